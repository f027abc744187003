"""Audit a path: find its checkpoints, read them, judge them."""

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpt_patches.audit import (
    blocks,
    checksums,
    coverage,
    damages,
    judge,
    megatron,
    megatron_torch,
    repaired,
    shifted,
    torch_dist,
    universal,
    zarr,
    zero,
)
from ckpt_patches.audit.checkpoint import Checkpoint
from ckpt_patches.audit.damages import DAMAGE, SUSPICION, Finding
from ckpt_patches.audit.scan import scan, without
from ckpt_patches.errors import UserError
from ckpt_patches.formats.megatron_torch import folders as megatron_torch_folders
from ckpt_patches.formats.universal import is_universal
from ckpt_patches.progress import Progress

WORKERS = 2
WHOLE, DAMAGED, UNCERTAIN = "whole", "damaged", "could not tell"
EXIT_STATUS = {WHOLE: 0, DAMAGED: 1, UNCERTAIN: 3}


@dataclass(frozen=True)
class Report:
    """What was found in one checkpoint."""

    checkpoint: Checkpoint
    findings: tuple[Finding, ...]
    shift: shifted.Shift | None = None  # of a checkpoint that was saved shifted

    @property
    def verdict(self) -> str:
        severities = {finding.kind.severity for finding in self.findings}
        if DAMAGE in severities:
            return DAMAGED
        return UNCERTAIN if SUSPICION in severities or not self.checkpoint.shards else WHOLE


def reader_of(path: Path) -> Callable[[Path], Checkpoint] | None:
    """The reader for what is in a folder; None if that is no checkpoint."""
    backend = megatron.backend(path)
    if backend is not None:
        return {"zarr": zarr.read, "torch_dist": torch_dist.read}.get(backend)
    if zero.is_zero(path):
        return zero.read
    if is_universal(path):
        return universal.read
    return megatron_torch.read if megatron_torch_folders(path) else None


def find(path: Path) -> Iterator[Path]:
    """The checkpoints in a path: itself, or what lies below it, in order; and what cannot be looked into."""
    if not path.is_dir():
        raise UserError(f"{path}: expected a checkpoint or a folder of checkpoints, found no folder")
    try:
        is_checkpoint = reader_of(path) is not None
        folders = [] if is_checkpoint else sorted(f for f in path.iterdir() if f.is_dir() and not f.is_symlink())
    except Exception:  # what it is, the audit says
        is_checkpoint, folders = True, []
    if is_checkpoint:
        yield path
    for folder in folders:
        yield from find(folder)


def audit(path: Path, workers: int = WORKERS) -> Report:
    """Read one checkpoint, whole, and judge it. One that cannot be read to its end is among the findings.

    Raises:
        UserError: it is no checkpoint in a format that is known.
    """
    found = Checkpoint(path, "unknown")
    findings: list[Finding] = []
    shift = None
    try:
        reader = reader_of(path)
        if reader is not None:
            found = reader(path)
            findings = found.findings
            shift = _judge(found, workers)
    except Exception as error:
        findings.append(_unreadable(path, error))
    else:
        if reader is None:
            raise UserError(f"{path}: not a checkpoint in a format that is known")
    return Report(found, tuple(findings), shift)


def _unreadable(path: Path, error: Exception) -> Finding:
    if isinstance(error, OSError):
        name = error.filename or str(path)
        return Finding(damages.UNREADABLE, str(name), detail=error.strerror or str(error))
    if isinstance(error, UserError):
        return Finding(damages.UNREADABLE, str(path), detail=str(error))
    at = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(at.filename).name}, line {at.lineno}"
    detail = f"a defect of the audit, please report it: {type(error).__name__}: {error} ({where})"
    return Finding(damages.UNREADABLE, str(path), detail=detail)


def _judge(found: Checkpoint, workers: int) -> shifted.Shift | None:
    """Read every element, and add to the findings what is wrong with them; what is known of a shift."""
    found.shards += coverage.others(found)
    found.repaired = repaired.read(found).ranges
    shards = [*found.shards, *checksums.rest(found.records, found.shards)]
    pieces: list[checksums.PartRead] = []
    checked = frozenset(record.path for record in found.records)
    empty = set()
    # The others are bytes that no array has; they are read for the checksums.
    with Progress(sum(shard.nbytes for shard in shards), label=f"{found.path.name}:") as progress:
        for shard, odd in zip(shards, scan(shards, workers, progress.show, checked, pieces), strict=True):
            own = without(odd.runs, found.repaired_in(shard), blocks.NO_AVG | blocks.NO_SQ | blocks.AVG_IS_LARGE)
            found.findings += judge.judge(shard, odd._replace(runs=own), found)
            if judge.has_no_moments(shard, own):
                empty.add(id(shard))
    found.findings += judge.checksums(found, pieces)
    found.findings += judge.of_parameters(found, empty)
    found.findings[:], shift = shifted.explained(found, found.findings)
    return shift
