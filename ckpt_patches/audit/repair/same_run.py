"""Find the elements of a tensor in an older checkpoint, and check that it is of the same run.

A checkpoint does not name its run. The check compares steps, tensor shapes, settings that a schedule does not change,
and weights: within a run, they move less than the distance between two initializations. Tensors are compared however
each checkpoint cuts them into shards.
"""

import math
from statistics import median
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ckpt_patches.errors import UserError
from ckpt_patches.formats.checkpoint import MASTER, WEIGHT, Checkpoint, Shard, Stream
from ckpt_patches.formats.dtypes import item_size
from ckpt_patches.formats.elements import as_float32, read_elements
from ckpt_patches.runtime.shown import shown

# Limit of the median of ||source - own|| / ||own||: at least 1 without correlation, 1.4 if both norms are equal.
# Measured with DeepSpeed 0.19.8, AdamW, steps 2 to 400 (tests/test_same_run.py). Learning rate 1e-3: up to 0.34 within
# a run, 1.29 to 1.49 between seeds; 1e-2: up to 0.75, 1.27 to 1.48.
BOUND = 1.0
SAMPLE = 1 << 16  # elements of each shard, from its middle
LEAST = 16  # elements needed to compare two shards
CONSTANT = ("betas", "eps", "momentum", "lr_mult", "wd_mult")  # settings of param groups

# By the array's name, and the label of a shard that is no part of a tensor.
Tensors: TypeAlias = "dict[tuple[str, str], list[tuple[Shard, Stream]]]"


def tensors(found: Checkpoint) -> Tensors:
    """The shards of each tensor of a checkpoint."""
    every: Tensors = {}
    for shard in found.shards:
        for stream in shard.streams.values():
            every.setdefault(_key(shard, stream), []).append((shard, stream))
    return every


def _key(shard: Shard, stream: Stream) -> tuple[str, str]:
    return stream.array, "" if shard.begin else shard.label


def _begin(shard: Shard) -> "npt.NDArray[np.int64]":
    """The place of a shard's first element in the tensor, as a column."""
    return np.array(shard.begin or (0,) * len(shard.shape), np.int64).reshape(-1, 1)


def _shape(parts: list[tuple[Shard, Stream]]) -> tuple[int, ...]:
    """The shape of a tensor, from its shards."""
    ends = [tuple((_begin(shard)[:, 0] + shard.shape).tolist()) for shard, _ in parts]
    return tuple(map(max, zip(*ends, strict=False)))


def read(source: Tensors, shard: Shard, own: Stream, begin: int, end: int) -> "npt.NDArray[np.generic] | None":
    """The bytes that a source has for some elements of a shard; None if it does not have all of them in this dtype."""
    places: npt.NDArray[np.int64] = np.stack(np.unravel_index(np.arange(begin, end), shard.shape)) + _begin(shard)
    size, found = item_size(own.dtype), 0
    data = np.empty((end - begin, size), np.uint8)
    low, high = (edge.reshape(-1, 1) for edge in (places.min(axis=1), places.max(axis=1)))
    for other, stream in source.get(_key(shard, own), []):
        if len(other.shape) != len(shard.shape) or stream.dtype != own.dtype:
            return None
        first, shape = _begin(other), np.array(other.shape).reshape(-1, 1)
        if (high < first).any() or (low >= first + shape).any():
            continue
        inner = places - first
        there = np.flatnonzero(((inner >= 0) & (inner < shape)).all(axis=0))
        if len(there):
            flat: Any = np.ravel_multi_index(tuple(inner[:, there]), other.shape)
            part = read_elements(stream, int(flat[0]), int(flat[-1]) + 1)
            data[there] = part.view(np.uint8).reshape(-1, size)[flat - flat[0]]
            found += len(there)
    return data.reshape(-1) if found == end - begin else None


def check(own: Checkpoint, source: Checkpoint, *, trust: bool) -> None:
    """Refuse a source that is not known to be an earlier checkpoint of the same run.

    Raises:
        UserError: it is the checkpoint itself or a later one; or, unless `trust`, it fails a check of the run.
    """
    if own.path.samefile(source.path):
        raise UserError(f"--from {source.path}: expected an older checkpoint, found the damaged one itself")
    if own.step is not None and source.step is not None and source.step > own.step:
        expected = f"expected step {own.step} at the latest, that of {own.path}"
        raise UserError(f"--from {source.path}: {expected}, found step {source.step}")
    why_not = "" if trust else _other_shapes(own, source) or _other_settings(own, source) or _too_far(own, source)
    if why_not:
        raise UserError(
            f"--from {source.path}: expected an earlier checkpoint of the run that saved {own.path}, but {why_not}; "
            "--trust-source takes it nevertheless"
        )


def _other_shapes(own: Checkpoint, source: Checkpoint) -> str:
    shapes, others = ({key: _shape(parts) for key, parts in tensors(found).items()} for found in (own, source))
    for key in sorted(shapes.keys() & others.keys()):
        if shapes[key] != others[key]:
            return f"{shown(key[0])} has the shape {list(others[key])} there, and {list(shapes[key])} here"
    parameters = {shard.parameter for shard in own.shards}
    if unknown := sorted({shard.parameter for shard in source.shards} - parameters):
        return f"it has {shown(unknown[0])}, which is not here"
    return ""


def _other_settings(own: Checkpoint, source: Checkpoint) -> str:
    if own.groups and source.groups and len(own.groups) != len(source.groups):
        return f"it has {len(source.groups)} param groups, and here are {len(own.groups)}"
    for number, (here, there) in enumerate(zip(own.groups, source.groups, strict=False)):
        for name in CONSTANT:
            if name in here and name in there and _plain(here[name]) != _plain(there[name]):
                return f"{name} of group {number} is {shown(there[name])} there, and {shown(here[name])} here"
    return ""


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _too_far(own: Checkpoint, source: Checkpoint) -> str:
    found = distance(own, source)
    if found is None:
        return "no weights of two dimensions can be compared"
    if found > BOUND:
        return f"its weights are {found:.2f} away from those here, relative to their norm, expected {BOUND} at most"
    return ""


def distance(own: Checkpoint, source: Checkpoint) -> float | None:
    """The median distance of weights with two dimensions or more; None if none can be compared."""
    every = tensors(source)
    found = [d for shard in own.shards if len(shard.shape) > 1 and (d := _distance(shard, every)) is not None]
    return median(found) if found else None


def _distance(shard: Shard, source: Tensors) -> float | None:
    """The relative distance of a weight, over elements that are finite and nonzero in both.

    Main parameters are compared if one has no weights of the model.
    """
    streams = [shard.streams[role] for role in (WEIGHT, MASTER) if role in shard.streams]
    for stream in (stream for stream in streams if _key(shard, stream) in source):
        begin = max((stream.numel - SAMPLE) // 2, 0)
        end = min(begin + SAMPLE, stream.numel)
        data = read(source, shard, stream, begin, end)
        here, there = as_float32(read_elements(stream, begin, end), stream.dtype), None
        if data is not None:
            there = as_float32(data, stream.dtype)
        if here is None or there is None:
            return None
        chosen = np.isfinite(here) & np.isfinite(there) & (here != 0) & (there != 0)
        norm = float(np.linalg.norm(here[chosen].astype(np.float64)))
        apart = float(np.linalg.norm(here[chosen].astype(np.float64) - there[chosen]))
        return apart / norm if np.count_nonzero(chosen) >= LEAST and norm and math.isfinite(apart) else None
    return None
