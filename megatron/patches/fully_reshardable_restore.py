"""Put `fully_reshardable` states that were saved shifted back in the load, or refuse them.

More than 150 lines: weights that fp8 has rounded, and those of the hybrid optimizer, are told from a shift.

https://github.com/NVIDIA/Megatron-LM/pull/5077
"""

from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import torch

    logger: Any = None

fix = Fix(
    __name__,
    upstream=("https://github.com/NVIDIA/Megatron-LM/pull/5077",),
    symptom="a checkpoint whose states were saved shifted loads wrong, without an error",
    releases=(("0.15.0", newest("megatron-core")),),
    stacks="fully_reshardable format, several buckets",
    silent=True,
)

UNDO = """state_dict = _without_shift(
    self.buffers, state_dict, isinstance(self.optimizer, HybridDeviceOptimizer)
)"""


def _without_shift(
    buffers: "list[Any]", state_dict: "dict[int, Any]", is_offloaded: "bool"
) -> "dict[int, Any]":
    """Return loaded `fully_reshardable` states, moved to their parameters if they were saved shifted.

    Args:
        buffers: those of the optimizer; their models' weights are loaded.
        state_dict: states by parameter, in the order of the buffers' `param_index_map`.
        is_offloaded: whether the optimizer has set a rank's weights to its own before the load.

    Raises:
        RuntimeError: states are in no file, or were cut by other buckets than those of this run.
    """
    import os

    found, lost, number = dict(state_dict), 0, 0
    for buffer in buffers:
        padding = [0]  # at the end of the buckets before each one
        for bucket in buffer.buckets:
            padding.append(padding[-1] + bucket.grad_data.numel() - bucket.numel_unpadded)
        places = [(p, *ends, padding[b]) for p, (*ends, b) in buffer.param_index_map.items()]
        numbers = range(number, number + len(places))
        number += len(places)
        states = [state_dict[index] for index in numbers]
        if not places or not _is_shifted(places, states, is_offloaded):
            continue
        for key in states[0].keys() - {"step"}:
            moved = _moved(places, [state[key] for state in states])
            for index, (weight, *_), values in zip(numbers, places, moved, strict=True):
                lost += int(values.isnan().sum())
                is_main = key in ("param", "fp32_param")
                filling = weight.detach().to(values) if is_main else torch.zeros_like(values)
                found[index] = {**found[index], key: torch.where(values.isnan(), filling, values)}
    if lost and os.environ.get("CKPT_PATCHES_LOST_STATES") != "zeros":
        raise RuntimeError(
            "this checkpoint was saved in fully_reshardable by a megatron-core that shifts states"
            f" (Megatron-LM#5077): expected all of them, found {lost} elements in no file. All others"
            " are restored. To go on without those, set CKPT_PATCHES_LOST_STATES=zeros: main"
            " parameters are taken from the weights, and moments are zero"
        )
    if lost:
        logger.warning(f"states that were saved shifted are restored, but for {lost} elements")
    return found


def _moved(places: "list[Any]", saved: "list[torch.Tensor]") -> "list[torch.Tensor]":
    """Return a state of each parameter from where it was cut; NaN where it is in no file.

    What the ranks gathered had no end padding, and was cut as if it had.
    """
    size = max(end - shift for _, _, end, shift in places)
    gathered = torch.full((size,), float("nan"), dtype=saved[0].dtype, device=saved[0].device)
    for (_, start, end, _), values in zip(places, saved, strict=True):
        there = max(0, min(end, size) - start)
        gathered[start : start + there] = values.flatten()[:there]
    return [
        gathered[start - shift : end - shift].reshape(weight.shape)
        for weight, start, end, shift in places
    ]


def _is_shifted(places: "list[Any]", states: "list[Any]", is_offloaded: "bool") -> "bool":
    """Whether main parameters round to the weights only where they are moved.

    Quantized weights and remainders of main parameters are not compared. The first parameter is
    never shifted: if it does not round, the weights are others than those of the checkpoint.

    Raises:
        RuntimeError: they do at neither place, and are far from the weights.
    """
    saved = [state["param"] if "param" in state else state["fp32_param"] for state in states]
    compared = [
        number
        for number, (weight, *_) in enumerate(places)
        if type(weight.data) is torch.Tensor and saved[number].is_floating_point()
    ]
    wrong = [number for number in compared if not _rounds(saved[number], places[number][0])]
    first = min(range(len(places)), key=lambda number: places[number][1])
    if not wrong or first not in compared:
        return False
    if first not in wrong:
        moved = _moved(places, saved)
        if all(_rounds(moved[number], places[number][0]) for number in compared):
            return True
        if not is_offloaded and any(_is_far(saved[number], places[number][0]) for number in wrong):
            raise RuntimeError(
                f"expected main parameters that round to the weights, found others in {len(wrong)} of"
                f" {len(compared)} parameters. If megatron-core 0.15 to 0.19 saved this checkpoint in"
                " fully_reshardable with several buckets, its states are shifted (Megatron-LM#5077):"
                " load it with the data-parallel size, the model-parallel sizes and the"
                " --ddp-bucket-size of the run that saved it, which are in the checkpoint's arguments."
                " To load the states as they are, set CKPT_PATCHES_SKIP=fully_reshardable_restore"
            )
    logger.warning(
        "expected main parameters that round to the weights, found others: not checked for a"
        " shift (Megatron-LM#5077), loaded as they are"
    )
    return False


def _is_far(main: "torch.Tensor", weight: "torch.Tensor") -> "bool":
    """Whether main parameters are others than the weights, not those that fp8 has rounded to them."""
    expected = weight.detach().to(main.device).float()
    return bool((main.float() - expected).nan_to_num().norm() > 0.5 * expected.norm())


def _rounds(main: "torch.Tensor", weight: "torch.Tensor") -> "bool":
    """Whether known main parameters round to the weights, up to two units in the last place.

    An eighth may not: rows that pad a vocabulary to another size have no counterpart in the file.
    """
    known, limits = ~main.isnan(), torch.finfo(weight.dtype)
    expected = weight.detach().to(main.device).float()[known]
    smallest = limits.smallest_normal * limits.eps
    fits = torch.isclose(main[known].float(), expected, 2 * limits.eps, 2 * smallest)
    return bool(fits.sum() * 8 >= fits.numel() * 7)


FUNCTIONS = (_without_shift, _moved, _is_shifted, _is_far, _rounds)


@fix.edit("megatron.core.optimizer.distrib_optimizer", ours_alone=True)
def load_what_was_saved_shifted(source: Source) -> None:
    """A run with the buckets of the one that saved knows where each element was cut."""
    load = source.function("DistributedOptimizer.load_parameter_state_from_fully_reshardable")
    source.skip_if((UNDO, load), *FUNCTIONS)
    source.insert_at_start(load, UNDO)
    for function in FUNCTIONS:
        source.insert_function_before("DistributedOptimizer", function)
