"""Check that the source of a repair is an earlier checkpoint of the same run.

A checkpoint does not name its run. The check compares steps, parameter shapes, settings that a schedule does not
change, and weights: within a run, they move less than the distance between two initializations.
"""

import math
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np

from ckpt_patches.errors import UserError
from ckpt_patches.formats.checkpoint import MASTER, WEIGHT, Checkpoint, Stream
from ckpt_patches.formats.elements import read_values
from ckpt_patches.runtime.shown import shown

# Limit of the median of ||source - own|| / ||own||: at least 1 without correlation, 1.4 if both norms are equal.
# Measured with DeepSpeed 0.19.8, AdamW, steps 2 to 400 (tests/test_same_run.py). Learning rate 1e-3: up to 0.34 within
# a run, 1.29 to 1.49 between seeds; 1e-2: up to 0.75, 1.27 to 1.48.
BOUND = 1.0
SAMPLE = 1 << 16  # elements of each shard, from its middle
LEAST = 16  # elements needed to compare two shards
CONSTANT = ("betas", "eps", "momentum", "lr_mult", "wd_mult")  # settings of param groups


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
    if not trust and (why := _why_not(own, source)):
        raise UserError(
            f"--from {source.path}: expected an earlier checkpoint of the run that saved {own.path}, but {why}; "
            "--trust-source takes it nevertheless"
        )


def _why_not(own: Checkpoint, source: Checkpoint) -> str:
    """Why the source may be of another run; empty if all checks pass."""
    return _other_shapes(own, source) or _other_settings(own, source) or _too_far(own, source)


def _other_shapes(own: Checkpoint, source: Checkpoint) -> str:
    shapes, others = _shapes(own), _shapes(source)
    for key in sorted(shapes.keys() & others.keys()):
        if shapes[key] != others[key]:
            return f"{shown(key[0])} has the shape {list(others[key])} there, and {list(shapes[key])} here"
    if unknown := sorted(others.keys() - shapes.keys()):
        return f"it has {shown(unknown[0][0])}, which is not here"
    return ""


def _shapes(found: Checkpoint) -> dict[tuple[str, str], tuple[int, ...]]:
    return {(shard.parameter, shard.label): shard.shape for shard in found.shards}


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
    found = [d for one, other in _pairs(own, source) if (d := _distance(one, other)) is not None]
    return median(found) if found else None


def _pairs(own: Checkpoint, source: Checkpoint) -> Iterator[tuple[Stream, Stream]]:
    """The same weights in both; main parameters if one has no weights of the model."""
    others = {(shard.parameter, shard.label, shard.shape): shard for shard in source.shards}
    for shard in own.shards:
        other = others.get((shard.parameter, shard.label, shard.shape))
        if other is None or len(shard.shape) < 2:
            continue
        role = next((r for r in (WEIGHT, MASTER) if r in shard.streams and r in other.streams), None)
        if role:
            yield shard.streams[role], other.streams[role]


def _distance(one: Stream, other: Stream) -> float | None:
    """The relative distance of two arrays, over elements that are finite and nonzero in both."""
    own, source = _sample(one), _sample(other)
    if own is None or source is None or own.shape != source.shape:
        return None
    there = np.isfinite(own) & np.isfinite(source) & (own != 0) & (source != 0)
    if np.count_nonzero(there) < LEAST:
        return None
    norm = float(np.linalg.norm(own[there].astype(np.float64)))
    apart = float(np.linalg.norm(own[there].astype(np.float64) - source[there]))
    return apart / norm if norm and math.isfinite(apart) else None


def _sample(stream: Stream) -> "np.ndarray[Any, np.dtype[np.float32]] | None":
    begin = max((stream.numel - SAMPLE) // 2, 0)
    return read_values(stream, begin, min(begin + SAMPLE, stream.numel))
