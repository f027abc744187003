"""Audit one checkpoint: read it, with one rank or several, and judge it."""

import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_patches.audit import repair_list, rules
from ckpt_patches.audit.judging import blocks, coverage, record_checksums, recorded_states, scan
from ckpt_patches.audit.run_folder import UNFINISHED, why_not_read
from ckpt_patches.errors import UserError
from ckpt_patches.formats import damages
from ckpt_patches.formats.checkpoint import Checkpoint, Shard
from ckpt_patches.formats.damages import DAMAGE, SUSPICION, Finding
from ckpt_patches.formats.elements import PartRead
from ckpt_patches.formats.reading import reader_of
from ckpt_patches.runtime.distributed import Ranks
from ckpt_patches.runtime.pause import without_garbage_collection
from ckpt_patches.runtime.progress import Progress

WHOLE, REPAIRED, DAMAGED, INCOMPLETE, UNKNOWN = "WHOLE", "REPAIRED", "DAMAGED", "INCOMPLETE", "UNKNOWN"
EXIT_STATUS = {WHOLE: 0, REPAIRED: 0, DAMAGED: 1, INCOMPLETE: 1, UNKNOWN: 3}
TO_RESUME_FROM = (WHOLE, REPAIRED)


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
        if damages.INCOMPLETE in severities:
            return INCOMPLETE
        if SUSPICION in severities or not self.checkpoint.shards:
            return UNKNOWN
        return REPAIRED if any(finding.kind is damages.REPAIRED for finding in self.findings) else WHOLE

    @property
    def repaired(self) -> int:
        """The number of elements that `ckpt-patches repair` wrote."""
        return sum(end - begin for ranges in self.checkpoint.repaired.values() for begin, end in ranges)


def audit(path: Path, workers: int | None = None, label: str = "") -> Report:
    """Read and judge one checkpoint. A read error becomes a finding.

    `label` is for the progress line. `workers` defaults to `Ranks.workers`, which depends on the number of processors.

    Raises:
        UserError: the path is not a checkpoint in a known format.
    """
    report = audit_together(path, workers or Ranks().workers, Ranks(), label)
    assert report is not None  # there is one rank
    return report


def audit_structure(path: Path) -> Report:
    """The report on a checkpoint's files, their sizes, indexes and steps. No element is read: it proves nothing whole.

    Raises:
        UserError: the path is not a checkpoint in a known format.
    """
    found, _ = _structure(path)
    return Report(found, tuple(found.findings))


def audit_together(path: Path, workers: int, ranks: Ranks, label: str = "") -> Report | None:
    """Like `audit`, for several ranks: rank 0 reads the structure and judges. Returns None on other ranks.

    Raises:
        UserError: the path is not a checkpoint in a known format, or a rank is missing.
    """
    own: list[tuple[Checkpoint, list[Shard]]] = []

    def read() -> list[scan.Span]:
        found, shards = _structure(path)
        own.append((found, shards))
        return list(scan.spans(shards, frozenset(record.path for record in found.records)))

    spans, label = ranks.first(f"reading the headers of {path}", read), label or path.name
    parts = _scan(label, spans, workers)
    if ranks.size > 1:
        shares = ranks.gather(f"reading {path}", lambda: _share(_scan(label, ranks.share(spans), workers)))
        parts = _in_order(shares, len(spans))
    return None if ranks.rank else _judge(*own[0], parts, workers)


def _structure(path: Path) -> tuple[Checkpoint, list[Shard]]:
    """A checkpoint before any element is read, and the shards to read: bytes outside all arrays have checksums, too."""
    found = Checkpoint(path, "unknown")
    try:
        reader = reader_of(path) if path.is_dir() else None
        if (reader is None or path.name.endswith(UNFINISHED)) and (why := why_not_read(path)):
            found.findings.append(why)
            return found, []
        if reader is not None:
            with without_garbage_collection():  # there can be millions of chunks
                found = reader(path)
                found.shards += coverage.others(found)
                return found, [*found.shards, *record_checksums.rest(found.records, found.shards)]
    except Exception as error:
        found.findings.append(_unreadable(path, error))
        return found, []
    raise UserError(f"{path}: not a checkpoint in a format that is known")


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


def _scan(label: str, spans: Sequence[scan.Span], workers: int) -> Iterator[scan.Part]:
    with Progress(sum(span.nbytes for span in spans), label=f"{label}:") as progress:
        yield from scan.scan(spans, workers, progress.show)


def _share(parts: Iterable[scan.Part]) -> list[scan.Part | Exception]:
    """One rank's results for rank 0: its parts or, after the first error, that as the last one."""
    found: list[scan.Part | Exception] = []
    try:
        found.extend(parts)
    except Exception as error:
        found.append(error)
    return found


def _in_order(shares: Sequence[list[scan.Part | Exception]], spans: int) -> Iterator[scan.Part]:
    """The parts of all spans, of which each rank has every n-th. Raises the error of a rank that could not read."""
    for number in range(spans):
        own = shares[number % len(shares)]
        part = own[min(number // len(shares), len(own) - 1)]
        if isinstance(part, Exception):
            raise part
        yield part


def _judge(found: Checkpoint, shards: list[Shard], parts: Iterable[scan.Part], workers: int) -> Report:
    """Judge a checkpoint from its scanned parts."""
    try:
        found.repaired = repair_list.read(found).ranges
        _apply_rules(found, shards, parts)
        recorded_states.decide(found, workers)
    except Exception as error:
        found.findings.append(_unreadable(found.path, error))
    return Report(found, tuple(found.findings))


def _apply_rules(found: Checkpoint, shards: list[Shard], parts: Iterable[scan.Part]) -> None:
    """Add the findings of all rules, of each shard and of several, and of the checksums."""
    pieces: list[PartRead] = []  # complete when all parts are read
    moments: list[rules.Part] = []
    scales: list[rules.Part] = []
    for shard, odd in zip(shards, scan.by_shard(parts, pieces), strict=True):
        # A repair's zeros are its own; a square of zero beside a first moment that is not was lost before.
        own = scan.without(odd, found.repaired_in(shard), blocks.NO_AVG | blocks.NO_SQ, unless=blocks.AVG_IS_LARGE)
        found.findings += rules.judge(shard, own, found)
        moments += rules.parts_of(shard, own, found)
        scales += rules.scales_of(shard, own)
    found.findings[:] = rules.of_zero_masters(found, found.findings)
    found.findings[:] = rules.of_sparse_moments(found, found.findings)
    found.findings[:] = rules.of_shifted_states(found, found.findings)
    found.findings += record_checksums.findings(found, pieces)
    found.findings += rules.of_moments(found, moments)
    found.findings += rules.of_scales(scales)
