"""Save `fully_reshardable` states at their correct offsets, and load those that were saved at wrong ones.

More than 150 lines: half of it restores, in the load, states that were saved shifted.

https://github.com/NVIDIA/Megatron-LM/pull/5077
"""

import ast
from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NoMatch, NotNeeded, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os

    import torch

    logger: Any = None

fix = Fix(
    __name__,
    upstream=("https://github.com/NVIDIA/Megatron-LM/pull/5077",),
    symptom="the loss is worse after a resume: states are saved shifted",
    releases=(("0.15.0", newest("megatron-core")),),
    stacks="fully_reshardable format, several buckets",
    silent=True,
    test="tests/unit_tests/dist_checkpointing/test_fully_reshardable_shift.py",
)


SAVE = "DistributedOptimizer.sharded_param_state_fully_reshardable"
# Parts of upstream's own fix (#5077), not in any release up to 0.19.2.
REPAIR = (
    "adjusted_start = param_world_start - padding_adjustment",
    "adjusted_end = param_world_end - padding_adjustment",
    "bucket_padding = bucket.grad_data.numel() - bucket.numel_unpadded",
)
ENDS = ("param_world_start", "param_world_end")
BUCKET = "bucket_id"
PADDING = f"end_padding[{BUCKET}]"
ALL_THERE = """assert missing_elems_num == 0, (
    f"expected the gathered {state_key} of '{sharded_metadata.key}' at"
    f" [{param_world_start}, {param_world_end}), found {missing_elems_num}"
    " elements less"
)"""


def _end_padding_before_buckets(buffer: Any) -> "list[int]":
    """Return the end padding before each bucket of a buffer, in elements.

    Buckets are padded so that they divide evenly among the ranks. `param_index_map` counts this
    padding, but states gathered from the ranks do not contain it.
    """
    found = [0]
    for bucket in buffer.buckets:
        found.append(found[-1] + bucket.grad_data.numel() - bucket.numel_unpadded)
    return found


@fix.edit("megatron.core.optimizer.distrib_optimizer", independent=True)
def cut_without_end_padding(source: Source) -> None:
    """Upstream slices states without end padding by ranges that include it, and fills the gaps with zeros."""
    save = source.function(SAVE)
    if _is_repaired(source):
        raise NotNeeded
    source.one(
        "state_ten = world_tensors[state_key][param_world_start:param_world_end]", within=save
    )
    loop = source.loop(f"model_param, ({', '.join(ENDS)}, ...)", within=save)
    bucket = _bucket(source, loop)
    lines = (
        "end_padding = _end_padding_before_buckets(buffer)",
        *(f"{end} -= {PADDING}" for end in ENDS),
    )
    is_named = source.text(bucket) == BUCKET
    source.skip_if(ALL_THERE, *lines, is_named, _end_padding_before_buckets, within=save)
    source.replace(bucket, BUCKET)
    source.insert_before(loop, lines[0])
    comment = "# What is gathered has no end padding of buckets, which these ranges include."
    source.insert_before(loop.body[0], "\n".join([comment, *lines[1:]]))
    source.replace(source.branch("missing_elems_num > 0", within=loop), ALL_THERE)
    source.insert_function_before("DistributedOptimizer", _end_padding_before_buckets)


def _is_repaired(source: Source) -> bool:
    """Whether upstream's own fix is there."""
    save = source.function(SAVE)
    return all(source.has(part, within=save) for part in REPAIR)


def _bucket(source: Source, loop: ast.For) -> ast.expr:
    """The loop variable for the bucket index of a buffer's parameter: `_` before this fix. Raises NoMatch."""
    assert isinstance(loop.target, ast.Tuple)
    assert isinstance(loop.target.elts[1], ast.Tuple)
    bucket = loop.target.elts[1].elts[-1]
    if source.text(loop.iter) != "buffer.param_index_map.items()" or source.text(bucket) not in (
        "_",
        BUCKET,
    ):
        raise NoMatch(
            f"expected {', '.join(ENDS)}, _ in a loop over `buffer.param_index_map.items()`"
        )
    return bucket


# The load. A file that upstream saved shifted, and this run has the buckets of the run that saved it.

UNDO = "state_dict = _without_shift(self.buffers, state_dict)"


def _without_shift(buffers: "list[Any]", state_dict: "dict[int, Any]") -> "dict[int, Any]":
    """Return loaded `fully_reshardable` states, moved to their parameters if they were saved shifted.

    Args:
        buffers: those of the optimizer; their models' weights are loaded.
        state_dict: states by parameter, in the order of the buffers' `param_index_map`.

    Raises:
        RuntimeError: states are in no file.
    """
    found, lost, number = dict(state_dict), 0, 0
    for buffer in buffers:
        padding = _end_padding_before_buckets(buffer)
        places = [(p, *ends, padding[b]) for p, (*ends, b) in buffer.param_index_map.items()]
        numbers = range(number, number + len(places))
        number += len(places)
        states = [state_dict[index] for index in numbers]
        if not places or not _is_shifted(places, states):
            continue
        for key in states[0].keys() - {"step"}:
            moved = _moved(places, [state[key] for state in states])
            for index, (weight, *_), values in zip(numbers, places, moved, strict=True):
                lost += int(values.isnan().sum())
                found[index] = {**found[index], key: _filled(key, values, weight)}
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


def _is_shifted(places: "list[Any]", states: "list[Any]") -> "bool":
    """Whether main parameters round to the weights only where they are moved.

    A warning tells where they do at neither place: other weights may be loaded on purpose.
    """
    saved = [state["param"] if "param" in state else state["fp32_param"] for state in states]
    weights = [weight for weight, *_ in places]
    first = min(range(len(places)), key=lambda index: places[index][1])
    if not _rounds(saved[first], weights[first]):
        return False  # weights of another kind, such as fp8: the first parameter is never shifted
    wrong = sum(not fits for fits in map(_rounds, saved, weights))
    if not wrong:
        return False
    if all(map(_rounds, _moved(places, saved), weights)):
        return True
    logger.warning(
        f"expected main parameters that round to the weights, found others in {wrong} of {len(places)}"
        " parameters: they are loaded as they are. If megatron-core 0.15 to 0.19 saved this checkpoint"
        " in fully_reshardable with several buckets, its states are shifted (Megatron-LM#5077): load it"
        " with the data-parallel size, the model-parallel sizes and the --ddp-bucket-size of the run"
        " that saved it, which are in the checkpoint's arguments"
    )
    return False


def _rounds(main: "torch.Tensor", weight: "torch.Tensor") -> "bool":
    """Whether known main parameters round to the weights, up to two units in the last place.

    An eighth may not: rows that pad a vocabulary to another size have no counterpart in the file.
    """
    known, limits = ~main.isnan(), torch.finfo(weight.dtype)
    expected = weight.detach().to(main.device).float()[known]
    smallest = limits.smallest_normal * limits.eps
    fits = torch.isclose(main[known].float(), expected, 2 * limits.eps, 2 * smallest)
    return bool(fits.sum() * 8 >= fits.numel() * 7)


def _filled(key: "str", values: "torch.Tensor", weight: "torch.Tensor") -> "torch.Tensor":
    """Return states with weights in place of lost main parameters, and zeros in place of lost moments."""
    if key in ("param", "fp32_param"):
        return torch.where(values.isnan(), weight.detach().to(values.device).float(), values)
    return torch.where(values.isnan(), torch.zeros_like(values), values)


LOADING: tuple[Any, ...] = (_without_shift, _moved, _is_shifted, _rounds, _filled)


@fix.edit("megatron.core.optimizer.distrib_optimizer", independent=True, ours_alone=True)
def load_what_was_saved_shifted(source: Source) -> None:
    """A run with the buckets of the one that saved knows where each element was cut."""
    load = source.function("DistributedOptimizer.load_parameter_state_from_fully_reshardable")
    functions = LOADING
    if _is_repaired(source):
        functions += (_end_padding_before_buckets,)  # which else is inserted with the repair
    has_os = source.imports("os")
    source.skip_if((UNDO, load), *functions, *([] if has_os else [False]))
    if not has_os:
        source.insert_before(source.one("import torch"), "import os")
    source.insert_at_start(load, UNDO)
    for function in functions:
        source.insert_function_before("DistributedOptimizer", function)
