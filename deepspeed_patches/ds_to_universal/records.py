"""What the headers of a checkpoint say, as the planner takes it. Offsets in files are bytes, other sizes elements."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_patches.formats.torch_file import TensorHeader

STATES = ("fp32", "exp_avg", "exp_avg_sq")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class File:
    """A file of the checkpoint; if one of these changes, the plan is no more."""

    path: Path
    size: int  # bytes
    mtime_ns: int


class Kind(NamedTuple):
    """What a tensor is besides its elements. This and the next are tuples, as there are thousands of them."""

    dtype: str  # torch's name
    requires_grad: bool = False


class Flat(NamedTuple):
    """A flattened tensor in a file."""

    file: int  # index of the file
    offset: int  # bytes from the start of the file
    numel: int
    kind: Kind


@dataclass(frozen=True)
class Step:
    """The optimizer's step as the file has it: a number, or a tensor of no dimension."""

    value: Any
    file: int
    known: object  # to compare: the number, or the tensor's bytes
    group: int  # of parameters


@dataclass(frozen=True)
class Partition:
    """One rank's share of one parameter group."""

    states: dict[str, Flat]  # by STATES
    step: Step | None
    fragments: dict[str, tuple[int, int]]  # stage 1 and 2: by parameter, where in the partition: start, elements


@dataclass(frozen=True)
class Rank:
    """What a rank's optimizer file holds."""

    file: int
    pp: int
    tp: int
    dp: int
    partitions: tuple[Partition, ...]  # by parameter group


@dataclass(frozen=True)
class ModelFile:
    """What a model-states file holds that the conversion needs."""

    file: int
    shapes: tuple[dict[str, Shape], ...]  # of the trained parameters, by parameter group
    module: dict[str, TensorHeader]  # the weights


@dataclass(frozen=True)
class Checkpoint:
    """All headers of a checkpoint."""

    folder: Path
    stage: int
    pp_degree: int
    tp_degree: int
    dp_degree: int
    files: tuple[File, ...]
    ranks: tuple[Rank, ...]  # in the order pp, tp, dp
    models: tuple[ModelFile, ...]  # stage 1 and 2: by pp, tp; stage 3: by tp, of data-parallel rank 0
    copied: tuple[int, ...]  # files that are copied as they are
    info: dict[str, Any]  # `universal_checkpoint_info`
    optimizer_state: dict[str, Any] = field(default_factory=dict)  # of the first rank, as upstream keeps it
