"""The result of a reader: where the elements of each array lie, and facts about the run."""

import bisect
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_patches.formats import settings
from ckpt_patches.formats.damages import Finding, FindingKind
from ckpt_patches.formats.dtypes import item_size
from ckpt_patches.formats.torch_file import TensorHeader

# The arrays of one parameter. In a mixed-precision run, the model's weight is the rounded main parameter.
WEIGHT, MASTER, EXP_AVG, EXP_AVG_SQ = "weight", "master", "exp_avg", "exp_avg_sq"
ROLES = (WEIGHT, MASTER, EXP_AVG, EXP_AVG_SQ)
MOMENTS = (EXP_AVG, EXP_AVG_SQ)
# Names of files that one rank writes: of ZeRO, by data- and model-parallel rank, of torch.distributed.checkpoint, verl.
RANK_FILE = re.compile(
    r".*zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_.*|(?:__|optim_world_size_\d+_rank_)(\d{1,9})(?:_\d{1,9}\.distcp|\.pt)"
)
ALONE = ", weights alone"  # suffix of the format's name if the checkpoint has no optimizer


class Extent(NamedTuple):
    """A byte range of a file."""

    path: str
    offset: int
    nbytes: int


class Joined:
    """Byte ranges of files, read as if they followed on one another."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        self.extents = [extent for extent in extents if extent.nbytes]
        self._ends = [*itertools.accumulate(extent.nbytes for extent in self.extents)]

    @property
    def nbytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    def part(self, begin: int, end: int) -> Iterator[Extent]:
        """Where the bytes from `begin` to `end` lie, in order; `end` is at most `nbytes`."""
        index = bisect.bisect_right(self._ends, begin)
        while begin < end:
            path, offset, nbytes = self.extents[index]
            skipped = begin - (self._ends[index] - nbytes)
            length = min(nbytes - skipped, end - begin)
            yield Extent(path, offset + skipped, length)
            begin, index = begin + length, index + 1


class Stream(NamedTuple):
    """The elements of one array's shard, in C order."""

    array: str  # its name in the checkpoint
    dtype: str  # torch's name, such as "float32"
    extents: tuple[Extent, ...]

    @property
    def numel(self) -> int:
        return sum(extent.nbytes for extent in self.extents) // item_size(self.dtype)

    def part(self, begin: int, end: int) -> Iterator[Extent]:
        """Where the elements from `begin` to `end` lie, in order; of more than there are, those that there are."""
        joined, size = Joined(self.extents), item_size(self.dtype)
        return joined.part(begin * size, min(end * size, joined.nbytes))


class Owner(NamedTuple):
    """The elements of a shard that one rank wrote."""

    rank: str  # such as "rank 3"; empty if unknown
    begin: int
    end: int


class Record(NamedTuple):
    """A byte range of a file with its own checksum (CRC-32)."""

    path: str
    offset: int
    nbytes: int
    crc: int
    zip: tuple[int, int]  # the enclosing zip archive's place in the file: offset, bytes


@dataclass(frozen=True)
class Shard:
    """One rank's (or all ranks') part of a parameter. All streams hold the same elements in the same order."""

    parameter: str
    label: str  # such as a zarr chunk's name or a file's rank; empty if the parameter is not sharded
    shape: tuple[int, ...]
    streams: dict[str, Stream]  # by role
    lost: dict[str, Stream] = field(default_factory=dict)  # streams with missing bytes
    has_rows: bool = True  # False for a buffer of many parameters with unknown layout, and padding of any value
    is_padding: bool = False  # for such a buffer: a gap between two parameters, which can hold any value
    begin: tuple[int, ...] = ()  # of its first element in the array, on each axis; empty if it is no part of one

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def owners(self) -> list[Owner]:
        """The ranks that wrote its elements, in order, by the names of their files."""
        own = [stream for role, stream in self.streams.items() if role != WEIGHT] or [*self.streams.values()]
        found: list[Owner] = []
        for extent in own[0].extents if own else ():
            begin, rank = found[-1].end if found else 0, rank_of(extent.path)
            end = begin + extent.nbytes // item_size(own[0].dtype)
            if found and found[-1].rank == rank:
                begin = found.pop().begin
            found.append(Owner(rank, begin, end))
        return found

    @property
    def row(self) -> int:
        """Elements per row, which is one token of an embedding or one unit of a layer. 1 for a vector."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def extents(self) -> Iterator[Extent]:
        """The bytes of all streams."""
        return (extent for stream in self.streams.values() for extent in stream.extents)

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for extent in self.extents)


def rank_of(path: str) -> str:
    """The rank that wrote a file, by its name; empty if that does not tell."""
    match = RANK_FILE.fullmatch(os.path.basename(path))
    if match is None:
        return ""
    model_parallel = f" of mp_rank_{match[2]}" if int(match[2] or 0) else ""
    return f"rank {int(match[1] or match[3])}{model_parallel}"


class Held(NamedTuple):
    """A tensor in a file."""

    path: str
    name: str  # its key in the file
    header: TensorHeader


def last_step(steps: Iterable[Any]) -> int | None:
    """The highest valid step count; None if no value is valid."""
    return max((int(step) for step in steps if settings.is_step(step)), default=None)


def first_beta(groups: Iterable[Any]) -> float | None:
    """The highest first beta in the settings of the param groups; 0 if any group has that; None if none has one."""
    betas = [group.get("betas") for group in groups if isinstance(group, dict)]
    first = [own[0] for own in betas if isinstance(own, (tuple, list)) and own]
    valid = [float(beta) for beta in first if settings.is_number(beta) and 0 <= beta < 1]
    return None if not valid else 0.0 if 0.0 in valid else max(valid)


@dataclass
class Checkpoint:
    """The structure of a checkpoint, before any element is read."""

    path: Path
    format: str
    step: int | None = None  # the optimizer's; None if unknown
    iteration: int | None = None  # training iteration that Megatron-LM saves; None if unknown
    beta1: float | None = None  # decay factor of the first moment per step
    data_parallel: int | None = None  # ranks that share the optimizer's states, those of context parallelism included
    model_parallel: tuple[int, int] = (1, 1)  # tensor- and pipeline-parallel sizes, from the run's arguments
    torch_fsdp2: bool | None = None  # whether it sharded the parameters, from the run's arguments; None if unknown
    sharding: str = ""  # Megatron's sharding type of the optimizer state; empty if unknown
    groups: list[dict[str, Any]] = field(default_factory=list)  # settings of param groups
    buffers: set[str] = field(default_factory=set)  # tensors listed as buffers, or without optimizer states
    neither: set[str] = field(default_factory=set)  # tensors that are neither the model's nor an optimizer's
    shards: list[Shard] = field(default_factory=list)
    repaired: dict[tuple[str, str], list[tuple[int, int]]] = field(default_factory=dict)  # by array and shard
    padded: list[Extent] = field(default_factory=list)  # byte ranges where everything outside the shards is padding
    read: set[str] = field(default_factory=set)  # names of the torch files that were read
    tensors: list[Held] = field(default_factory=list)  # tensors of the files, whether a shard has them or not
    records: list[Record] = field(default_factory=list)  # the checksums to verify
    findings: list[Finding] = field(default_factory=list)  # problems of its files
    recorded: Any = None  # fingerprints that the run recorded at the save; None if it recorded none

    def add(self, kind: FindingKind, array: str, detail: str = "", shard: str = "") -> None:
        """Add a finding."""
        self.findings.append(Finding(kind, array, detail, shard))

    def repaired_in(self, shard: Shard) -> list[tuple[int, int]]:
        """Element ranges of a shard whose moments `ckpt-patches repair` reset or took from an older checkpoint."""
        arrays = [shard.streams[role].array for role in MOMENTS if role in shard.streams]
        return [found for array in arrays for found in self.repaired.get((array, shard.label), [])]

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)
