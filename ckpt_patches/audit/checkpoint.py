"""What a reader makes of a checkpoint: which elements of which array lie where, and what is known of the run."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ckpt_patches.audit.damages import Finding

# The arrays of one parameter. The weight is the model's own, which a mixed-precision run rounds from the master.
WEIGHT, MASTER, EXP_AVG, EXP_AVG_SQ = "weight", "master", "exp_avg", "exp_avg_sq"
ROLES = (WEIGHT, MASTER, EXP_AVG, EXP_AVG_SQ)
MOMENTS = (EXP_AVG, EXP_AVG_SQ)


class Extent(NamedTuple):
    """Bytes of a file."""

    path: str
    offset: int
    nbytes: int


class Stream(NamedTuple):
    """The elements of one array's shard, in C order."""

    array: str  # its name in the checkpoint
    dtype: str  # torch's name, as "float32"
    extents: tuple[Extent, ...]


@dataclass(frozen=True)
class Shard:
    """One rank's (or all ranks') part of a parameter: the streams have the same elements in the same order."""

    parameter: str
    label: str  # a zarr chunk's name, a file's rank; empty if the parameter is in one piece
    shape: tuple[int, ...]
    streams: dict[str, Stream]  # by role

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass
class Checkpoint:
    """A checkpoint as a reader finds it, before any element is read."""

    path: Path
    format: str
    step: int | None = None  # of the optimizer; None if the checkpoint does not say
    beta1: float | None = None  # how much of the first moment is left after a step
    data_parallel: int | None = None  # ranks
    shards: list[Shard] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)  # what is wrong with its files

    @property
    def nbytes(self) -> int:
        return sum(e.nbytes for shard in self.shards for stream in shard.streams.values() for e in stream.extents)
