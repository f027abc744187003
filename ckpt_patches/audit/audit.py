"""Audit a path: find its checkpoints, read them, judge them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpt_patches.audit import judge, megatron, zarr
from ckpt_patches.audit.checkpoint import Checkpoint
from ckpt_patches.audit.damages import DAMAGE, SUSPICION, Finding
from ckpt_patches.audit.scan import scan
from ckpt_patches.errors import UserError

WORKERS = 2
WHOLE, DAMAGED, UNCERTAIN = "whole", "damaged", "could not tell"
EXIT_STATUS = {WHOLE: 0, DAMAGED: 1, UNCERTAIN: 2}

Progress = Callable[[Path, int, int], None]  # the checkpoint, bytes read, bytes in all


@dataclass(frozen=True)
class Report:
    """What was found in one checkpoint."""

    checkpoint: Checkpoint
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> str:
        severities = {finding.kind.severity for finding in self.findings}
        if DAMAGE in severities:
            return DAMAGED
        return UNCERTAIN if SUSPICION in severities or not self.checkpoint.shards else WHOLE


def reader_of(path: Path) -> Callable[[Path], Checkpoint] | None:
    """The reader for what is in a folder; None if that is no checkpoint."""
    if megatron.backend(path) == "zarr":
        return zarr.read
    return None


def find(path: Path) -> Iterator[Path]:
    """The checkpoints in a path: itself, or what lies below it, in order."""
    if not path.is_dir():
        raise UserError(f"{path}: expected a checkpoint or a folder of checkpoints, found no folder")
    if reader_of(path):
        yield path
        return
    for folder in sorted(path.iterdir()):
        if folder.is_dir() and not folder.is_symlink():
            yield from find(folder)


def audit(path: Path, progress: Progress = lambda *_: None, workers: int = WORKERS) -> Report:
    """Read one checkpoint, whole, and judge it."""
    reader = reader_of(path)
    if reader is None:
        raise UserError(f"{path}: not a checkpoint in a format that is known")
    found = reader(path)
    done = 0

    def read(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(path, done, found.nbytes)

    scanned = scan(found.shards, workers, read)
    findings = list(found.findings)
    for shard, runs in zip(found.shards, scanned, strict=True):
        findings += judge.judge(shard, runs, found)
    findings += judge.of_parameters(found, scanned)
    return Report(found, tuple(findings))
