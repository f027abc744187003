"""Find the elements of a tensor in an older checkpoint, and check that it is of the same run.

A checkpoint does not name its run. The check compares steps, tensor shapes, settings that a schedule does not change,
and weights: within a run, they move less than the distance between two initializations. Tensors are compared however
each checkpoint cuts them into shards.
"""

from collections.abc import Iterator
from statistics import median
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ckpt_patches.errors import UserError
from ckpt_patches.formats import settings
from ckpt_patches.formats.checkpoint import MASTER, WEIGHT, Checkpoint, Shard, Stream
from ckpt_patches.formats.dtypes import item_size
from ckpt_patches.formats.elements import Block, as_float32, read_elements
from ckpt_patches.runtime.shown import shown

# Limit of the median of ||source - own|| / ||own||: at least 1 without correlation, 1.4 if both norms are equal.
# Measured with DeepSpeed 0.19.8, AdamW, steps 2 to 400 (tests/tools/test_same_run.py). Learning rate 1e-3: up to 0.34
# within a run, 1.29 to 1.49 between seeds; 1e-2: up to 0.75, 1.27 to 1.48.
BOUND = 1.0
SAMPLE = 1 << 16  # elements of each shard, from its middle
LEAST = 16  # elements needed to compare two shards
CONSTANT = ("betas", "eps", "momentum", "lr_mult", "wd_mult")  # settings of param groups

# By the array's name, and the label of a shard that is no part of a tensor.
Tensors: TypeAlias = "dict[tuple[str, str], list[tuple[Shard, Stream]]]"
Edges: TypeAlias = "npt.NDArray[np.int64]"


def tensors(found: Checkpoint) -> Tensors:
    """The shards of each tensor of a checkpoint."""
    every: Tensors = {}
    for shard in found.shards:
        for stream in shard.streams.values():
            every.setdefault(_key(shard, stream), []).append((shard, stream))
    return every


def _key(shard: Shard, stream: Stream) -> tuple[str, str]:
    return stream.array, "" if _place(shard) else shard.label


def _place(shard: Shard) -> tuple[int, ...]:
    """Where a shard begins in its tensor; empty for buckets, which other numbers of ranks may cut otherwise."""
    return shard.begin if shard.has_rows else ()


def _edges(shard: Shard) -> tuple[Edges, Edges]:
    """Where a shard begins and ends in its tensor, as columns with a row for each axis."""
    begin = np.array(_place(shard) or (0,) * len(shard.shape), np.int64).reshape(-1, 1)
    return begin, begin + np.array(shard.shape, np.int64).reshape(-1, 1)


def read(source: Tensors, shard: Shard, own: Stream, begin: int, end: int) -> "Block | None":
    """The bytes that a source has for some elements of a shard; None if it does not have all of them in this dtype."""
    places = np.stack(np.unravel_index(np.arange(begin, end), shard.shape)) + _edges(shard)[0]
    size, found = item_size(own.dtype), 0
    data = np.empty((end - begin, size), np.uint8)
    for other, stream in source.get(_key(shard, own), []):
        if len(other.shape) != len(shard.shape) or stream.dtype != own.dtype:
            return None
        first, last = _edges(other)
        there = np.flatnonzero(((places >= first) & (places < last)).all(axis=0))
        if len(there):
            flat: npt.NDArray[np.intp] = np.ravel_multi_index(tuple((places - first)[:, there]), other.shape)
            part = read_elements(stream, int(flat[0]), int(flat[-1]) + 1)
            data[there] = part.view(np.uint8).reshape(-1, size)[flat - flat[0]]
            found += len(there)
    return data.reshape(-1) if found == end - begin else None


def check(own: Checkpoint, source: Checkpoint) -> None:
    """Refuse a source that is not known to be an earlier checkpoint of the same run.

    Raises:
        UserError: it is the checkpoint itself or a later one, or of another run.
    """
    if reason := next(_differences(own, source), ""):
        raise UserError(f"--from {source.path}: expected an older checkpoint of the run of {own.path}, but {reason}")


def _differences(own: Checkpoint, source: Checkpoint) -> Iterator[str]:
    """Why the source cannot be an earlier checkpoint of the same run."""
    if own.path.samefile(source.path):
        yield "it is the damaged one itself"
    if own.step is not None and source.step is not None and source.step > own.step:
        yield f"its step is {source.step}, expected {own.step} at the latest"
    here, there = _shapes(own), _shapes(source)
    for name in sorted(here.keys() & there.keys()):
        if here[name] != there[name]:
            yield f"the shape of {shown(name)} is {there[name]} there, and {here[name]} here"
    parameters, others = ({shard.parameter for shard in found.shards} for found in (own, source))
    for name in sorted(others - parameters):
        yield f"it has {shown(name)}, which is not here"
    if own.groups and source.groups and len(own.groups) != len(source.groups):
        yield f"it has {len(source.groups)} param groups, and here are {len(own.groups)}"
    for number, (mine, other) in enumerate(zip(own.groups, source.groups, strict=False)):
        for name in (name for name in CONSTANT if name in mine and name in other):
            if settings.canonical(mine[name]) != settings.canonical(other[name]):
                yield f"{name} of group {number} is {shown(other[name])} there, and {shown(mine[name])} here"
    if (apart := distance(own, source)) is None:
        yield "no weights of two dimensions can be compared"
    elif apart > BOUND:
        yield f"its weights are {apart:.2f} away from those here, relative to their norm, expected {BOUND} at most"


def _shapes(found: Checkpoint) -> dict[str, list[int]]:
    """The shape of each tensor, from its shards, by its name."""
    ends = {key: [_edges(shard)[1].ravel().tolist() for shard, _ in own] for key, own in tensors(found).items()}
    return {" ".join(key).strip(): list(map(max, *own, own[0])) for key, own in ends.items()}


def distance(own: Checkpoint, source: Checkpoint) -> float | None:
    """The median distance of weights with two dimensions or more; None if none can be compared."""
    every = tensors(source)
    found = [apart for shard in own.shards if len(shard.shape) > 1 for apart in _distance(shard, every)]
    return median(found) if found else None


def _distance(shard: Shard, source: Tensors) -> Iterator[float]:
    """The relative distance of a weight, over elements that are finite and nonzero in both, if it can be compared.

    Main parameters are compared if one has no weights of the model.
    """
    own = [shard.streams[role] for role in (WEIGHT, MASTER) if role in shard.streams]
    for stream in [stream for stream in own if _key(shard, stream) in source][:1]:
        begin = max((stream.numel - SAMPLE) // 2, 0)
        end = min(begin + SAMPLE, stream.numel)
        data = read(source, shard, stream, begin, end)
        here = as_float32(read_elements(stream, begin, end), stream.dtype)
        there = None if data is None else as_float32(data, stream.dtype)
        if here is None or there is None:
            return
        chosen = np.isfinite(here) & np.isfinite(there) & (here != 0) & (there != 0)
        norm = float(np.linalg.norm(here[chosen].astype(np.float64)))
        if norm and np.count_nonzero(chosen) >= LEAST:
            yield float(np.linalg.norm(here[chosen].astype(np.float64) - there[chosen])) / norm
