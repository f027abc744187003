"""The findings of a checkpoint as rows for people: grouped by cause, the cause first."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpt_patches.audit import audit
from ckpt_patches.audit.audit import Report
from ckpt_patches.formats import damages
from ckpt_patches.formats.damages import DAMAGE, INCOMPLETE, NOTE, SUSPICION, Finding, FindingKind
from ckpt_patches.formats.trackers import TRACKERS
from ckpt_patches.runtime.shown import printable
from ckpt_patches.runtime.units import in_bytes

VERDICTS = (audit.DAMAGED, audit.INCOMPLETE, audit.UNKNOWN, audit.REPAIRED, audit.WHOLE)
SEVERITIES = (DAMAGE, INCOMPLETE, SUSPICION, NOTE)
# Absent files, and what is then absent of parameters in the files of others.
ABSENT = (damages.BAD_METADATA, damages.MISSING_RANK, damages.ONE_MODEL_FILE, damages.BAD_FILE)
FOLLOWING = (damages.FRAGMENTS, damages.MISSING_WEIGHT)
ORDER = list(dict.fromkeys((*ABSENT, damages.MIXED_RANKS, damages.FOREIGN_FILE, *damages.KINDS.values())))


@dataclass(frozen=True)
class Row:
    """Findings of one kind and with the same detail, or with a common cause."""

    kind: FindingKind
    where: str  # the array or file, its shard, and the range in that; of the first of several
    detail: str


def rows(report: Report, *, notes: bool) -> list[Row]:
    """The rows, sorted by severity and cause. Notes only if `notes` is set."""
    of_all = cause(report)
    grouped: dict[tuple[FindingKind, object], list[Finding]] = {}
    for own in report.findings:
        if notes or own.kind.severity != NOTE:
            place = own.array, own.shard, own.begin
            key = "" if of_all and own.kind in FOLLOWING else own.detail or place
            grouped.setdefault((own.kind, key), []).append(own)
    found = [_row(report, own, "" if key else f"can follow from {of_all}") for (_, key), own in grouped.items()]
    return sorted(found, key=lambda row: (SEVERITIES.index(row.kind.severity), ORDER.index(row.kind)))


def cause(report: Report) -> str:
    """The name of the kind of an absent file; empty if none is absent."""
    found = {finding.kind for finding in report.findings}
    return next((kind.name for kind in ABSENT if kind in found), "")


def _row(report: Report, own: list[Finding], detail: str) -> Row:
    first = own[0]
    where = " ".join(filter(None, (first.array, first.shard, in_range(first))))
    if len(own) > 1:
        where = f"{first.array} (+{len(own) - 1:,})"
    if not detail:
        detail = first.detail.replace(f"{report.checkpoint.path}/", "").removeprefix(first.array).lstrip(": ")
    return Row(first.kind, printable(where.replace(f"{report.checkpoint.path}/", "")), printable(detail))


def what_to_do(report: Report, *, notes: bool) -> list[tuple[str, str]]:
    """The name of each kind that is a cause, with a sentence on what it means and what to do."""
    kinds = dict.fromkeys(row.kind for row in rows(report, notes=notes))
    return [(own.name, f"{own.meaning}; {own.remedy}") for own in kinds if not (own in FOLLOWING and cause(report))]


def summary(report: Report) -> str:
    """The kinds and places of each severity but notes, such as `2 kinds of damage in 12 places`."""
    found = [[own for own in report.findings if own.kind.severity == severity] for severity in SEVERITIES[:-1]]
    return ", ".join(_counted(own) for own in found if own)


def _counted(findings: list[Finding]) -> str:
    kinds, places = {finding.kind for finding in findings}, {finding.array for finding in findings}
    return f"{counted(len(kinds), 'kind')} of {findings[0].kind.severity} in {counted(len(places), 'place')}"


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def headline(reports: Sequence[Report]) -> str:
    """The number of checkpoints with each verdict, worst first; a tracker that names none is counted apart."""
    verdicts = [report.verdict for report in reports if not _is_tracker(report)]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS if verdict in verdicts]
    bad = len(reports) - len(verdicts)
    said = [f"{counted(len(verdicts), 'checkpoint')}: {', '.join(counts)}"] if counts else []
    return "; ".join([*said, *([f"{counted(bad, 'tracker')} without a checkpoint"] if bad else [])])


def _is_tracker(report: Report) -> bool:
    path = report.checkpoint.path
    return path.name in TRACKERS and not path.is_dir()


def about(report: Report) -> str:
    """The format, step and ranks of a checkpoint, and its size if no file is absent."""
    found = report.checkpoint
    known = [] if found.format == "unknown" else [found.format]
    known += [] if cause(report) or report.verdict == audit.INCOMPLETE else [in_bytes(found.nbytes)]
    known += [f"step {found.step}"] if found.step is not None else []
    known += [f"{found.data_parallel} data-parallel ranks"] if found.data_parallel else []
    return ", ".join(known)


def by_severity(found: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """The rows of each severity, the worst first."""
    found = list(found)
    every = [(severity, [row for row in found if row.kind.severity == severity]) for severity in SEVERITIES]
    return [(severity, own) for severity, own in every if own]


def in_range(finding: Finding) -> str:
    """The half-open range of elements in the shard."""
    return "" if finding.begin is None else f"[{finding.begin}, {finding.end})"
