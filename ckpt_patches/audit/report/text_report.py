"""Report an audit as text or as JSON."""

import textwrap
from collections.abc import Iterator
from typing import Any

from ckpt_patches.audit.audit import DAMAGED, INCOMPLETE, REPAIRED, WHOLE, Report
from ckpt_patches.audit.report.rows import Row, by_severity, cause, counted, headline, rows, summary, what_to_do
from ckpt_patches.audit.report.run_report import RunReport
from ckpt_patches.formats.damages import NOTE, Finding
from ckpt_patches.runtime import terminal
from ckpt_patches.runtime.shown import printable, shortened
from ckpt_patches.runtime.units import in_bytes

SCHEMA = 3  # of the JSON; raised when a key changes its meaning or is removed
HEADS = ("where", "detail")  # after the severity
COLORS = {DAMAGED: "red", INCOMPLETE: "red", WHOLE: "green", REPAIRED: "green"}  # of verdicts
INDENT = 2 * " "
COLUMNS = 80  # of a line for a finding, unless the terminal is wider
LEAST = 30  # columns of a detail, whatever the names beside it take
MOST_ROWS = 10  # per kind; JSON has all findings
Cells = tuple[str, str, str]  # of a row


def as_json(reports: list[Report], runs: list[RunReport]) -> dict[str, Any]:
    """The schema is documented in docs/reference/json.md."""
    checkpoints = [checkpoint_as_json(report) for report in reports]
    return {"schema": SCHEMA, "checkpoints": checkpoints, "runs": [run.as_json() for run in runs]}


def line_as_json(report: Report) -> dict[str, Any]:
    """One checkpoint as a JSON document of its own."""
    return {"schema": SCHEMA, **checkpoint_as_json(report)}


def checkpoint_as_json(report: Report) -> dict[str, Any]:
    """One entry of `checkpoints`."""
    found = report.checkpoint
    return {
        "path": str(found.path),
        "format": found.format,
        "verdict": report.verdict,
        "repaired": report.repaired,
        "step": found.step,
        "data_parallel": found.data_parallel,
        "bytes": found.nbytes,
        "findings": [_finding(finding) for finding in report.findings],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "name": finding.kind.name,
        "severity": finding.kind.severity,
        "array": shortened(finding.array),
        "shard": shortened(finding.shard),
        "range": None if finding.begin is None else [finding.begin, finding.end],
        "detail": shortened(finding.detail),
        "remedy": finding.kind.remedy,
    }


def as_text(report: Report, *, notes: bool) -> str:
    """The verdict, and a line for each group of findings; notes only if `notes` is set."""
    verdict = terminal.paint(report.verdict, COLORS.get(report.verdict, "yellow"))
    if report.verdict == REPAIRED:
        verdict += f", {report.repaired} elements are not the run's own"
    begin = f"{printable(str(report.checkpoint.path))}: {verdict}"
    found = rows(report, notes=notes)
    if len(found) == 1 and found[0].where == str(report.checkpoint.path):
        return terminal.filled(f"{begin}: {found[0].detail}; {found[0].kind.remedy}")
    lines = [terminal.filled(f"{begin} ({known})" if (known := about(report)) else begin)]
    if not found:
        return lines[0]
    lines += [f"  {counts}"] if (counts := summary(report)) else []
    columns = max(COLUMNS, terminal.width()) - len(INDENT)
    cells = [line for severity, own in by_severity(found) for line in [(severity, *HEADS), *_cells(own)]]
    lines += [f"{INDENT}{line}" for line in terminal.table(_shortened(cells, columns))]
    for name, sentence in what_to_do(report, notes=notes):
        lines += textwrap.wrap(f"{name}: {sentence}", columns, initial_indent=INDENT, subsequent_indent=2 * INDENT)
    return "\n".join(lines)


def last_lines(reports: list[Report], runs: list[RunReport], *, notes: bool) -> list[str]:
    """The lines that follow the last checkpoint: a count of the verdicts and hidden notes, and a line for each run."""
    hidden = 0 if notes else sum(finding.kind.severity == NOTE for own in reports for finding in own.findings)
    counts = [headline(reports), *([f"{counted(hidden, 'note')} hidden (show: --notes)"] if hidden else [])]
    lines = ["; ".join(counts)] if len(reports) > 1 or hidden else []
    return [*lines, *(terminal.filled(printable(run.as_text())) for run in runs)]


def about(report: Report) -> str:
    """The format, step and ranks of a checkpoint, and its size if no file is absent."""
    found = report.checkpoint
    known = [] if found.format == "unknown" else [found.format]
    known += [] if cause(report) or report.verdict == INCOMPLETE else [in_bytes(found.nbytes)]
    known += [f"step {found.step}"] if found.step is not None else []
    known += [f"{found.data_parallel} data-parallel ranks"] if found.data_parallel else []
    return ", ".join(known)


def _cells(found: list[Row]) -> Iterator[Cells]:
    """The cells of the first rows of each kind, and the number of the others."""
    for kind in dict.fromkeys(row.kind for row in found):
        own = [row for row in found if row.kind is kind]
        few = own if len(own) <= MOST_ROWS else own[: MOST_ROWS - 1]
        yield from ((kind.name, row.where, row.detail) for row in few)
        if len(few) < len(own):
            yield kind.name, f"and {len(own) - len(few):,} more (--json)", ""


def _shortened(cells: list[Cells], columns: int) -> list[Cells]:
    """Shorten places in the middle and details at the end. Places are not, if two of them became the same."""
    kinds, places, details = (max(map(len, column)) for column in zip(*cells, strict=True))
    left = columns - kinds - 2 * terminal.GAP
    room = min(places, max(left - details, left // 2))
    where = {place: shortened(place, room) for _, place, _ in cells}
    if len({*where.values()}) < len(where):
        where, room = {place: place for place in where}, places
    most = max(left - room, LEAST)
    return [
        (kind, where[place], detail if len(detail) <= most else f"{detail[: most - 1]}…")
        for kind, place, detail in cells
    ]
