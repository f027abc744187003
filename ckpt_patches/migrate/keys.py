"""Names in a checkpoint: what they become, and what a name says. Pure.

Up to megatron-core 0.13 chained optimizers, as those of a model with experts, put `chained_<number>.` in front.
"""

import re
from typing import NamedTuple

# Megatron's names of how the distributed optimizer's state is cut up.
MODEL_SPACE, BUCKETS = "fully_sharded_model_space", "fully_sharded_bucket_space"
GATHERED = "dp_zero_gather_scatter"
RESHARDABLE, DP_RESHARDABLE = "fully_reshardable", "dp_reshardable"
# What each becomes.
TARGETS = {MODEL_SPACE: RESHARDABLE, BUCKETS: DP_RESHARDABLE, GATHERED: GATHERED}

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)", re.DOTALL)
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
_BUCKET = re.compile(r"((?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+)\.(.+)", re.DOTALL)
_IN_BUCKET = re.compile(r"gbuf_idx_(\d+)\.dtype_(.+)\.bucket_idx_(\d+)\.(param|exp_avg|exp_avg_sq)", re.DOTALL)
# Of a model-space state the old and the new name.
_STATES = {"fp32_param": "param", "param": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


class Bucket(NamedTuple):
    """Which bucket of a rank's buffers an array is the state of."""

    group: str  # the name of its data-parallel group, in front of all names of it
    buffer: int
    dtype: str  # of parameters and gradients, as a pair
    number: int


def model_key(name: str) -> str | None:
    """The name of the parameter that an array is a state of; None if it is of none."""
    found = _STATE.fullmatch(name)
    return found[2] if found else None


def is_of_optimizer(name: str) -> bool:
    """Whether an array or an object is the optimizer's, by its name."""
    return _OPTIMIZER.match(name) is not None


def in_model_space(name: str) -> str | None:
    """The new name of an array; None of a state of the optimizer that is not known."""
    found = _STATE.fullmatch(name)
    if found:
        return f"optimizer.state.{_STATES[found[1]]}.{found[2]}" if found[1] in _STATES else None
    return None if is_of_optimizer(name) else name


def bucket_of(name: str) -> Bucket | None:
    """None if an array is no state of a bucket."""
    found = _BUCKET.fullmatch(name)
    inner = _IN_BUCKET.fullmatch(found[2]) if found else None
    return Bucket(found[1], int(inner[1]), inner[2], int(inner[3])) if found and inner else None


def object_keys(names: list[str]) -> dict[str, str]:
    """The name that each object gets: with the number of all objects, which old releases left out on the last axis.

    A name is that of the object, "/shard_", its number on each axis, "_", how many there are on each.
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
