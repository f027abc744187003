"""The state of a Megatron run besides its optimizer: learning-rate scheduler, data position and RNG states.

The record has it separately, under RUN: an optimizer is verified when it has loaded, and this state loads later.
"""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import distributed

from ckpt_patches.fingerprint.proof import rank_in
from ckpt_patches.fingerprint.record import SettingDifference, Settings, digest, other_differences, plain_values
from ckpt_patches.fingerprint.verdict import Besides

RUN = "run"
SCHEDULER, POSITION, LAYOUT, RNG = "learning-rate scheduler", "data position", "layout", "RNG states of rank "
SCHEDULERS = ("opt_param_scheduler", "lr_scheduler")  # its keys in a state dict: Megatron's, verl's
COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
NOT_RECORDED = "the checkpoint's fingerprint does not have it"
EXPERTS = "expert-parallel-rng"  # name of the experts' state in the RNG state tracker


def of_save(state_dict: Mapping[str, Any]) -> dict[str, Settings]:
    """This rank's run state while it saves this state dict."""
    found = {LAYOUT: layout(), f"{RNG}{rank_in(None)}": rng_states()}
    if "args" in state_dict:
        found[POSITION] = position(state_dict["args"])
    for key in SCHEDULERS:
        if isinstance(scheduler := state_dict.get(key), dict):
            found[SCHEDULER] = plain_values(scheduler)
    return found


def of_scheduler(saved: Mapping[str, Settings], scheduler: Any) -> Besides:
    """Compare a loaded scheduler with the record; only its steps, if it overrides loaded values."""
    its, live = saved.get(SCHEDULER), plain_values(scheduler.state_dict())
    if its is None:
        return Besides([], [], {SCHEDULER: NOT_RECORDED})
    if getattr(scheduler, "override_opt_param_scheduler", False):
        its, live = ({"num_steps": one.get("num_steps")} for one in (its, live))
    return _compared({SCHEDULER: its}, {SCHEDULER: live})


def of_load(saved: Mapping[str, Settings], args: Any) -> Besides:
    """Compare a completely loaded run, given its arguments, with the record."""
    found = _compared({k: v for k, v in saved.items() if k == POSITION}, {POSITION: position(args)})
    if POSITION not in saved:
        found.not_verified[POSITION] = NOT_RECORDED
    if getattr(args, "no_load_rng", False):
        found.not_verified["RNG states"] = "they were not loaded: --no-load-rng"
    elif saved.get(LAYOUT) != layout():
        found.not_verified["RNG states"] = (
            f"saved in another layout, {_said(saved.get(LAYOUT, {}))}; now {_said(layout())}"
        )
    else:
        _compare_rng(
            found, saved.get(f"{RNG}{rank_in(None)}", {}), bool(getattr(args, "data_parallel_random_init", False))
        )
    return found


def _compare_rng(found: Besides, saved: Settings, all_are_saved: bool) -> None:
    live = rng_states()
    promised = {kind for kind in live if _is_saved(kind, all_are_saved)}
    differ = sorted(kind for kind in live if saved.get(kind) != live[kind])
    wrong = [SettingDifference(f"{RNG}{rank_in(None)}", k, saved.get(k), live[k]) for k in differ if k in promised]
    found.differences.extend(wrong)
    if not wrong:
        found.equal.append("RNG states")
    if not promised.issuperset(differ):
        found.not_verified["RNG states of other data-parallel ranks"] = "Megatron saves those of the first one"


def _compared(saved: Mapping[str, Settings], live: Mapping[str, Settings]) -> Besides:
    """Compare the values that both releases have."""
    common = {what: {k: v for k, v in its.items() if k in live[what]} for what, its in saved.items()}
    differences = other_differences(common, {what: {k: live[what][k] for k in its} for what, its in common.items()})
    return Besides([] if differences else sorted(saved), differences, {})


def position(args: Any) -> Settings:
    """The position in the data, from the arguments of Megatron-LM's scripts."""
    return {name: getattr(args, name) for name in COUNTERS if isinstance(getattr(args, name, None), int)}


def layout() -> Settings:
    """The number of ranks, in total and for each kind of parallelism."""
    from megatron.core import parallel_state

    sizes = {"ranks": distributed.get_world_size() if distributed.is_initialized() else 1}
    kinds = {
        "TP": "tensor_model",
        "PP": "pipeline_model",
        "CP": "context",
        "EP": "expert_model",
        "ETP": "expert_tensor",
    }
    for name, kind in kinds.items() if parallel_state.model_parallel_is_initialized() else ():
        size = getattr(parallel_state, f"get_{kind}_parallel_world_size", None)
        if size is not None:
            sizes[name] = size()
    return sizes


def _said(its: Settings) -> str:
    return ", ".join(f"{number} {name}" if name == "ranks" else f"{name} {number}" for name, number in its.items())


def rng_states() -> Settings:
    """Digests of this rank's random generators, by their purpose."""
    return {kind: digest(states, 8) for kind, states in _generators()}


def _generators() -> Iterator[tuple[str, Any]]:
    from megatron.core.tensor_parallel import random as of_megatron

    name, keys, *rest = np.random.get_state()
    yield (
        "of the host",
        (random.getstate(), name, np.asarray(keys).tobytes(), [*map(float, rest)], _bytes(torch.get_rng_state())),
    )
    tracked = {name: _bytes(state) for name, state in of_megatron.get_cuda_rng_tracker().get_states().items()}
    experts = tracked.pop(EXPERTS, None)
    device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    yield "of the model", (_bytes(device), sorted(tracked.items()))
    if experts is not None:
        yield "of experts", experts


def _bytes(state: Any) -> Any:
    """The bytes of a generator or of its state."""
    state = state.get_state() if hasattr(state, "get_state") else state
    return state.cpu().numpy().tobytes() if isinstance(state, torch.Tensor) else state


def _is_saved(kind: str, all_are_saved: bool) -> bool:
    """Whether Megatron saves this rank's own RNG states of this kind.

    Args:
        kind: one of `rng_states`.
        all_are_saved: --data-parallel-random-init is set: all data-parallel ranks with context-parallel rank 0 save.
    """
    from megatron.core import parallel_state

    if all_are_saved and parallel_state.get_context_parallel_rank() == 0:
        return True
    if kind == "of experts":
        of_experts = getattr(parallel_state, "get_expert_data_parallel_rank", None)
        of_experts = of_experts or parallel_state.get_data_modulo_expert_parallel_rank
        return bool(of_experts() == 0)
    return bool(parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0)
