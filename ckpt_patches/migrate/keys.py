"""Parse and convert the names in a checkpoint. Pure.

Up to megatron-core 0.13 chained optimizers, such as those of a model with experts, add the prefix `chained_<number>.`.
"""

import re
from typing import NamedTuple

# Megatron's names for the sharding types of the distributed optimizer's state.
MODEL_SPACE, BUCKETS = "fully_sharded_model_space", "fully_sharded_bucket_space"
GATHERED = "dp_zero_gather_scatter"
RESHARDABLE, DP_RESHARDABLE = "fully_reshardable", "dp_reshardable"
# The new type of each.
TARGETS = {MODEL_SPACE: RESHARDABLE, BUCKETS: DP_RESHARDABLE, GATHERED: GATHERED}

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)", re.DOTALL)
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
_BUCKET = re.compile(r"((?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+)\.(.+)", re.DOTALL)
_IN_BUCKET = re.compile(r"gbuf_idx_(\d+)\.dtype_(.+)\.bucket_idx_(\d+)\.(param|exp_avg|exp_avg_sq)", re.DOTALL)
# New names of model-space states, by old name.
_STATES = {"fp32_param": "param", "param": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


class Bucket(NamedTuple):
    """The bucket of a rank's buffers that an array belongs to."""

    group: str  # name of its data-parallel group, the prefix of the group's arrays
    buffer: int
    dtype: str  # of parameters and gradients, as a pair
    number: int


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


def bucket_of(name: str) -> Bucket | None:
    """The bucket of an array; None if the array is not a bucket's state."""
    found = _BUCKET.fullmatch(name)
    inner = _IN_BUCKET.fullmatch(found[2]) if found else None
    return Bucket(found[1], int(inner[1]), inner[2], int(inner[3])) if found and inner else None


def object_keys(names: list[str]) -> dict[str, str]:
    """The new name of each object. It includes the count on the last axis, which old releases left out.

    A name is `<object>/shard_<index on each axis>_<count on each axis>`.
    """
    last: dict[str, int] = {}
    parts = {name: _SHARD.fullmatch(name) for name in names}
    for found in filter(None, parts.values()):
        last[found[1]] = max(last.get(found[1], 0), int(found[2].split(".")[-1]))
    return {name: _with_count(found, last[found[1]] + 1) if found else name for name, found in parts.items()}


_SHARD = re.compile(r"(.+)/shard_(\d+(?:\.\d+)*)(?:_(\d+(?:\.\d+)*))?", re.DOTALL)


def _with_count(found: re.Match[str], count: int) -> str:
    name, offset, shape = found[1], found[2], found[3]
    if shape is not None and shape.count(".") == offset.count("."):
        return found[0]
    known = [shape] if shape is not None else []
    return f"{name}/shard_{offset}_{'.'.join([*known, str(count)])}"
