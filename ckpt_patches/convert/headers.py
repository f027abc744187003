"""What the headers of a checkpoint say, as the planner takes it. Offsets in files are bytes, other sizes elements."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_patches.convert.experts import Experts, LocalExpert
from ckpt_patches.formats.zero import ModelFile, Partition


@dataclass(frozen=True)
class File:
    """A file of the checkpoint; if one of these changes, the plan is no more."""

    path: Path
    size: int  # bytes
    mtime_ns: int


@dataclass(frozen=True)
class Rank:
    """What a rank's optimizer file holds."""

    file: int
    pp: int
    tp: int
    dp: int
    partitions: tuple[Partition, ...]  # by parameter group


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
    experts: dict[str, Experts] = field(default_factory=dict)  # of AutoEP, by parameter
    local_experts: dict[str, LocalExpert] = field(default_factory=dict)  # of `deepspeed.moe`, by parameter
    expert_models: tuple[ModelFile, ...] = ()  # stage 3: by expert-parallel rank, of its first data-parallel rank
    rewritten: tuple[tuple[int, dict[str, Any]], ...] = ()  # files that are not copied, and what they become
