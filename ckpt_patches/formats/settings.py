"""Checks of param group settings and steps in checkpoints: which values no optimizer accepts. Pure."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckpt_patches.runtime.shown import shown

# Settings that must be finite. Betas are checked separately.
NUMBERS = ("lr", "weight_decay", "eps", "momentum", "max_lr", "min_lr")
# Numbers that a user or a schedule sets, the same on all ranks.
SETTINGS = {
    *NUMBERS,
    *("initial_lr", "alpha", "rho", "dampening", "lr_decay", "start_wd", "end_wd", "wd_mult", "lr_mult", "step"),
}
MOST_STEPS = 1 << 53  # NaN and infinity are no step counts either


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_step(value: Any) -> bool:
    return is_number(value) and 0 <= value <= MOST_STEPS


def is_not_finite(value: Any) -> bool:
    """Whether a value is NaN or infinity."""
    return isinstance(value, float) and not math.isfinite(value)


def not_numbers(groups: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield messages for settings that no optimizer accepts."""
    for number, group in enumerate(groups):
        for name in NUMBERS:
            if is_not_finite(group.get(name)):
                yield f"group {number}: {name} is {group[name]}"
        betas = group.get("betas")
        for beta in betas if isinstance(betas, (list, tuple)) else ():
            if is_number(beta) and not 0 <= beta <= 1:
                yield f"group {number}: a beta is {beta}, expected one from 0 to 1"


def not_steps(steps: Mapping[str, Any]) -> Iterator[str]:
    """Yield messages for values that are not step counts. `steps` is by name in the messages."""
    for called, step in steps.items():
        if not is_step(step):
            yield f"{called} is {shown(step)}, expected a number of steps"


def not_groups(groups: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield messages for param groups without `lr` or `params`, or with a duplicate parameter."""
    seen: set[int | str] = set()
    for number, group in enumerate(groups):
        if "lr" not in group:
            yield f"group {number} has no lr"
        params = group.get("params")
        if not isinstance(params, (list, tuple)):
            yield f"group {number} does not name its parameters"
            continue
        keys = [param for param in params if type(param) in (int, str)]
        if len(set(keys)) < len(keys) or not seen.isdisjoint(keys):
            yield f"group {number} has a parameter twice, or one of another group"
        seen.update(keys)


def unlike_groups(groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield messages for groups whose settings are a strict subset of another group's.

    Groups of one optimizer have the same settings. Of two kinds, such as Muon and Adam, each has some of its own.
    """
    for number, group in enumerate(groups):
        fuller = next((other for other in groups if group.keys() < other.keys()), group)
        if absent := sorted(map(str, fuller.keys() - group.keys())):
            yield f"group {number} has no {', '.join(map(shown, absent[:5]))}, and another group has"


# Settings by which megatron-core distinguishes param groups, and those that its scheduler sets.
IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "max_lr", "min_lr", "start_wd", "end_wd")
OF_ONE_OPTIMIZER = ("betas", "eps", "bias_correction")


def same_groups(groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield messages for groups of a Megatron optimizer that a load cannot distinguish, or cannot find."""
    seen: dict[str, int] = {}
    for number, group in enumerate(groups):
        if "wd_mult" not in group:
            return
        flags = {key: group.get(key) for key in ("is_expert_parallel", "is_decoupled_lr", "default_config")}
        odd = [key for key, value in flags.items() if value is not None and not isinstance(value, bool)]
        odd += [key for key in ("wd_mult", "lr_mult") if not is_number(group.get(key, 1.0))]
        if odd:
            yield f"group {number}: {odd[0]} is {shown(group[odd[0]])}"
        first = seen.setdefault(str(canonical([group.get(key) for key in (*IDENTITY, "optimizer")])), number)
        if first != number:
            yield f"groups {first} and {number} have the same multipliers and bounds: a load takes one for the other"


def unlike_schedules(groups: Sequence[Mapping[str, Any]], *, experts_are_apart: bool) -> Iterator[str]:
    """Yield messages for settings that differ although Megatron keeps them equal in all groups of one optimizer.

    Args:
        groups: the optimizer's param groups.
        experts_are_apart: whether groups of experts belong to another optimizer.
    """
    if not groups or not all("wd_mult" in group and "max_lr" in group for group in groups):
        return
    for name in (*OF_ONE_OPTIMIZER, *(["is_expert_parallel"] if experts_are_apart else [])):
        other = next((n for n, group in enumerate(groups) if differ(group.get(name), groups[0].get(name))), None)
        if other is not None:
            yield f"{name} is {_shown(groups[0].get(name))} in group 0, {_shown(groups[other].get(name))} in {other}"
    rates: dict[str, tuple[int, Any]] = {}
    for number, group in enumerate(groups):
        bounds = [group.get(key) for key in ("lr_mult", "is_decoupled_lr", "max_lr", "min_lr")]
        first, rate = rates.setdefault(str(canonical(bounds)), (number, group.get("lr")))
        if differ(rate, group.get("lr")):
            yield f"lr is {_shown(rate)} in group {first}, {_shown(group.get('lr'))} in {number}, of the same bounds"


TORCHS_ADAM = frozenset({"betas", "eps", "amsgrad", "capturable"})  # settings of torch's Adam and AdamW alone

# The numbers and names of a group's parameters, which differ between pipeline stages.
NAMES = ("params", "param_names")


def differences(own: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """Yield messages for differences between two copies of a group's settings."""
    for name in sorted(own.keys() | other.keys(), key=str):
        if name not in NAMES and differ(own.get(name), other.get(name)) and not is_own(name, own.get(name)):
            yield f"{shown(name)} is {_shown(own.get(name))}, and {_shown(other.get(name))}"


def is_own(name: Any, value: Any) -> bool:
    """Whether a setting is a number that each rank can have for itself, as the distances of Prodigy's gradients."""
    return isinstance(value, float) and name not in SETTINGS


def differ(one: Any, other: Any) -> bool:
    """Whether two plain values (numbers, strings, None, short lists or tuples of these) differ; others never do."""
    if one is other or not _is_plain(one) or not _is_plain(other):
        return False
    return bool(canonical(one) != canonical(other))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) < 100 and all(item is None or isinstance(item, (int, float, str)) for item in value)
    return value is None or isinstance(value, (int, float, str))


def canonical(value: Any) -> Any:
    """A value for comparison: NaN equals itself, and a list equals the tuple of its items."""
    if isinstance(value, (list, tuple)):
        return tuple(map(canonical, value))
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


def _shown(value: Any) -> str:
    return f"{shown(value)}" if _is_plain(value) else type(value).__name__
