"""What a reader makes of a checkpoint: which elements of which array lie where, and what is known of the run."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_patches.audit.damages import Finding
from ckpt_patches.formats.dtypes import item_size
from ckpt_patches.formats.torch_file import TensorHeader

# The arrays of one parameter. The weight is the model's own, which a mixed-precision run rounds from the master.
WEIGHT, MASTER, EXP_AVG, EXP_AVG_SQ = "weight", "master", "exp_avg", "exp_avg_sq"
ROLES = (WEIGHT, MASTER, EXP_AVG, EXP_AVG_SQ)
MOMENTS = (EXP_AVG, EXP_AVG_SQ)
# In the names of parameters whose rows are tokens, of which many are never seen.
VOCABULARY = ("embedding", "embed_tokens", "output_layer", "lm_head", "wte", "vocab")
ALONE = ", weights alone"  # ends the name of a format, of a checkpoint without an optimizer
MOST_STEPS = 1 << 53  # beyond them is no number of steps; NaN and infinity are none either


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

    @property
    def numel(self) -> int:
        return sum(extent.nbytes for extent in self.extents) // item_size(self.dtype)


class Owner(NamedTuple):
    """Which elements of a shard a rank wrote."""

    rank: str  # or the file that it wrote
    begin: int
    end: int


class Record(NamedTuple):
    """Bytes of a file with a checksum of their own (CRC-32)."""

    path: str
    offset: int
    nbytes: int
    crc: int
    zip: tuple[int, int]  # where in the file the zip is that it belongs to: offset, bytes


class Copies(NamedTuple):
    """A file of the checkpoint, by its name, and those that are missing because they were written over each other."""

    name: str
    missing: tuple[str, ...]
    differs: str  # what it has of the rank that wrote it, and another rank's can have been another; empty if nothing
    lost: str  # why they are no copies of it; empty if they are


@dataclass(frozen=True)
class Shard:
    """One rank's (or all ranks') part of a parameter: the streams have the same elements in the same order."""

    parameter: str
    label: str  # a zarr chunk's name, a file's rank; empty if the parameter is in one piece
    shape: tuple[int, ...]
    streams: dict[str, Stream]  # by role
    owners: tuple[Owner, ...] = ()  # empty where the checkpoint does not tell
    lost: dict[str, Stream] = field(default_factory=dict)  # streams whose bytes are not all there
    has_rows: bool = True  # and not a buffer of many parameters, whose layout the checkpoint does not tell
    has_zero_padding: bool = False  # of such a buffer: its padding cannot hold anything else
    is_padding: bool = False  # of such a buffer: what lies between two parameters, and can hold anything

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def has_odd_padding(self) -> bool:
        """Whether elements between the parameters can be anything."""
        return not self.has_rows and not self.has_zero_padding

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for stream in self.streams.values() for extent in stream.extents)


class Held(NamedTuple):
    """A tensor that a file holds."""

    path: str
    name: str  # its place in the file
    header: TensorHeader


def last_step(steps: Iterable[Any]) -> int | None:
    """The highest of the steps that files say; None where none of them is a number that a step can be."""
    return max((int(step) for step in steps if isinstance(step, (int, float)) and 0 <= step < MOST_STEPS), default=None)


def first_beta(groups: Iterable[Any]) -> float | None:
    """Of the settings of parameter groups the highest first beta; None if none says one."""
    betas = [group.get("betas") for group in groups if isinstance(group, dict)]
    first = [own[0] for own in betas if isinstance(own, (tuple, list)) and own]
    return max((beta for beta in first if isinstance(beta, float) and 0 <= beta < 1), default=None)


@dataclass
class Checkpoint:
    """A checkpoint as a reader finds it, before any element is read."""

    path: Path
    format: str
    step: int | None = None  # of the optimizer; None if the checkpoint does not say
    iteration: int | None = None  # of the run, by what Megatron-LM saves; None if the checkpoint does not say
    beta1: float | None = None  # how much of the first moment is left after a step
    data_parallel: int | None = None  # ranks
    model_parallel: tuple[int, int] = (1, 1)  # tensor- and pipeline-parallel ranks, by the run's arguments
    expert_parallel: int = 1  # ranks, by the same
    torch_fsdp2: bool | None = None  # whether it cut the parameters, by the same; None if the checkpoint does not say
    sharding: str = ""  # Megatron's name of how the optimizer's state is cut up; empty if the checkpoint does not say
    names_sharding: bool = False  # where megatron-core looks for it since 0.15
    groups: list[dict[str, Any]] = field(default_factory=list)  # settings of param groups
    knows_trained: bool = False  # a tensor without states of an optimizer is none that the run trains
    buffers: set[str] = field(default_factory=set)  # tensors that the files call buffers, or that have no states
    shards: list[Shard] = field(default_factory=list)
    repaired: dict[tuple[str, str], list[tuple[int, int]]] = field(default_factory=dict)  # by array and shard
    padded: list[Extent] = field(default_factory=list)  # bytes of which shards are parts, and the rest is padding
    read: set[str] = field(default_factory=set)  # names of torch files
    tensors: list[Held] = field(default_factory=list)  # all, of which a reader makes shards
    records: list[Record] = field(default_factory=list)  # whose checksums are to be right
    copies: list[Copies] = field(default_factory=list)  # files that are missing, and are copies of one that is there
    findings: list[Finding] = field(default_factory=list)  # what is wrong with its files
    recorded: Any = None  # fingerprints, of the run that saved it; None if it has recorded none

    def repaired_in(self, shard: Shard) -> list[tuple[int, int]]:
        """Ranges of a shard whose moments `ckpt-patches repair` has reset, or taken from an older checkpoint."""
        arrays = [shard.streams[role].array for role in MOMENTS if role in shard.streams]
        return [found for array in arrays for found in self.repaired.get((array, shard.label), [])]

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)
