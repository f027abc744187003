"""Audit a path: find its checkpoints, read them, judge them."""

import hashlib
import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ckpt_patches.audit import (
    blocks,
    checksums,
    coverage,
    damages,
    judge,
    megatron,
    megatron_torch,
    recorded,
    repaired,
    scan,
    shifted,
    torch_dist,
    universal,
    zarr,
    zero,
)
from ckpt_patches.audit.checkpoint import Checkpoint, Shard
from ckpt_patches.audit.damages import DAMAGE, SUSPICION, Finding
from ckpt_patches.audit.shares import shares
from ckpt_patches.audit.team import Team, UnreadableShareError
from ckpt_patches.errors import UserError
from ckpt_patches.formats.megatron_torch import folders as megatron_torch_folders
from ckpt_patches.formats.universal import is_universal
from ckpt_patches.group import Group, processors
from ckpt_patches.meeting import OthersFailed
from ckpt_patches.progress import Progress

if TYPE_CHECKING:
    from ckpt_patches.fingerprint.states import OfZero

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


def audit(path: Path, workers: int | None = None, team: Team | None = None, of_zero: "OfZero | None" = None) -> Report:
    """Read one checkpoint, whole, and judge it. One that cannot be read to its end is among the findings.

    Without a number of workers as many as there are processors; `of_zero` gives the fingerprints of a ZeRO checkpoint.
    In a team this is for the first process, which has ordered the audit; the others call `tell_share`.

    Raises:
        UserError: it is no checkpoint in a format that is known.
        OthersFailed: another process of the team has failed.
    """
    team = team or Team()
    team.next_audit()
    found = Checkpoint(path, "unknown")
    findings: list[Finding] = []
    shift = None
    try:
        reader = reader_of(path)
        if reader is not None:
            found = reader(path)
            findings = found.findings
            workers = workers or Group().workers(processors())
            shift = _judge(found, workers, team)
            found.findings += recorded.findings(found, path, workers, of_zero)
    except OthersFailed:
        raise
    except UnreadableShareError as error:
        findings.append(error.finding)
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


def tell_share(path: Path, workers: int, team: Team) -> None:
    """Read this process's share of a checkpoint that the first process of the team audits, and tell it what is odd.

    Raises:
        OthersFailed: the first process has failed.
    """
    team.next_audit()
    files, reason = "", None
    try:
        reader = reader_of(path)
        if reader is None:
            raise UserError(f"{path}: not a checkpoint in a format that is known")
        found = reader(path)
        found.shards += coverage.others(found)
        own, files = _share(found, all_shards(found), team)
        team.tell_parts(scan.scan(own, workers, lambda _: team.check()), files)
    except OthersFailed:
        raise
    except Exception as error:
        finding = _unreadable(path, error)
        reason = finding.array, finding.detail
    team.tell_end(files, reason)


def _judge(found: Checkpoint, workers: int, team: Team) -> shifted.Shift | None:
    """Read every element, and add to the findings what is wrong with them; what is known of a shift."""
    found.shards += coverage.others(found)
    found.repaired = repaired.read(found).ranges
    shards = all_shards(found)
    pieces: list[checksums.PartRead] = []
    return judged(found, shards, _odd(found, shards, workers, team, pieces), pieces)


def judged(
    found: Checkpoint, shards: list[Shard], odds: Iterable[scan.Odd], pieces: list[checksums.PartRead]
) -> shifted.Shift | None:
    """Add to the findings what is wrong with these shards, of each of which is given what is odd; what is known of a
    shift. By the end of `odds` the checksums of all that was read are in `pieces`.
    """
    empty = set()
    for shard, odd in zip(shards, odds, strict=True):
        own = scan.without(odd.runs, found.repaired_in(shard), blocks.NO_AVG | blocks.NO_SQ | blocks.AVG_IS_LARGE)
        found.findings += judge.judge(shard, odd._replace(runs=own), found)
        if judge.has_no_moments(shard, own):
            empty.add(id(shard))
    found.findings += judge.checksums(found, pieces)
    found.findings += judge.of_parameters(found, empty)
    found.findings[:], shift = shifted.explained(found, found.findings)
    return shift


def all_shards(found: Checkpoint) -> list[Shard]:
    """And bytes that no array has; they are read for the checksums."""
    return [*found.shards, *checksums.rest(found.records, found.shards)]


def _odd(
    found: Checkpoint, shards: list[Shard], workers: int, team: Team, pieces: list[checksums.PartRead]
) -> Iterator[scan.Odd]:
    """What is odd about every shard; checksums are added to `pieces`. Other processes read their shares meanwhile."""
    share = _share(found, shards, team)
    whose = f" (share of process 0 of {team.size})" if team.size > 1 else ""
    with Progress(sum(span.nbytes for span in share.spans), label=f"{found.path.name}{whose}:") as progress:

        def show(done: int) -> None:
            progress.show(done)
            team.check()

        own = scan.scan(share.spans, workers, show)
        yield from scan.by_shard(itertools.chain(own, team.parts_of_others(share.files)), len(shards), pieces)


class _Share(NamedTuple):
    """What this process reads."""

    spans: list[scan.Span]
    files: str  # a fingerprint of what all processes read; nothing where there is one


def _share(found: Checkpoint, shards: list[Shard], team: Team) -> _Share:
    every = list(scan.spans(shards, frozenset(record.path for record in found.records)))
    if team.size == 1:
        return _Share(every, "")
    own = shares([span.nbytes for span in every], team.size)[team.rank]
    return _Share(every[own.start : own.stop], fingerprint(shards))


def fingerprint(shards: list[Shard]) -> str:
    """Of what is read, and of which shard it is."""
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(repr((shard.label, shard.numel, shard.streams)).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
