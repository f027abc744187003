"""The names in an old checkpoint, and their new names. Pure.

Up to megatron-core 0.13 chained optimizers, such as those of a model with experts, add the prefix `chained_<number>.`.
"""

import re

# Megatron's names for the sharding types of the distributed optimizer's state.
MODEL_SPACE, BUCKETS = "fully_sharded_model_space", "fully_sharded_bucket_space"
GATHERED = "dp_zero_gather_scatter"
RESHARDABLE, DP_RESHARDABLE = "fully_reshardable", "dp_reshardable"
# The new type of each.
TARGETS = {MODEL_SPACE: RESHARDABLE, BUCKETS: DP_RESHARDABLE, GATHERED: GATHERED}

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)", re.DOTALL)
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
_SHARD = re.compile(r"(.+)/shard_(\d+(?:\.\d+)*)(?:_(\d+(?:\.\d+)*))?", re.DOTALL)
# New names of model-space states, by old name.
_STATES = {"fp32_param": "param", "param": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def model_key(name: str) -> str | None:
    """The name of the parameter that a state belongs to; None if the array is not a state."""
    found = _STATE.fullmatch(name)
    return found[2] if found else None


def is_of_optimizer(name: str) -> bool:
    """Whether an array or an object belongs to the optimizer, by its name."""
    return _OPTIMIZER.match(name) is not None


def in_model_space(name: str) -> str | None:
    """The new name of an array; None for an unknown state of the optimizer."""
    found = _STATE.fullmatch(name)
    if found:
        return f"optimizer.state.{_STATES[found[1]]}.{found[2]}" if found[1] in _STATES else None
    return None if is_of_optimizer(name) else name


def object_keys(names: list[str]) -> dict[str, str]:
    """The new name of each object. It includes the count on the last axis, which old releases left out.

    A name is `<object>/shard_<index on each axis>_<count on each axis>`.
    """
    last: dict[str, int] = {}
    parts = {name: _SHARD.fullmatch(name) for name in names}
    for found in filter(None, parts.values()):
        last[found[1]] = max(last.get(found[1], 0), int(found[2].split(".")[-1]))
    return {name: _with_count(found, last[found[1]] + 1) if found else name for name, found in parts.items()}


def _with_count(found: re.Match[str], count: int) -> str:
    name, index, counts = found.groups()
    if counts is not None and counts.count(".") == index.count("."):
        return found[0]
    return f"{name}/shard_{index}_{'.'.join([*filter(None, [counts]), str(count)])}"
