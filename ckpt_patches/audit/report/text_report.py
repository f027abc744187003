"""Report an audit as text or as JSON."""

import shlex
import textwrap
from collections.abc import Iterator
from typing import Any

from ckpt_patches.audit.audit import DAMAGED, INCOMPLETE, REPAIRED, TO_RESUME_FROM, WHOLE, Report
from ckpt_patches.audit.report.rows import Row, about, by_severity, counted, headline, rows, summary, what_to_do
from ckpt_patches.audit.report.run_report import RunReport, with_kinds
from ckpt_patches.formats.damages import NOTE, Finding
from ckpt_patches.runtime import terminal
from ckpt_patches.runtime.shown import printable, shortened

SCHEMA = 3  # of the JSON; raised when a key changes its meaning or is removed
HEADS = ("where", "detail")  # after the severity
COLORS = {DAMAGED: "red", INCOMPLETE: "red", WHOLE: "green", REPAIRED: "green"}  # of verdicts
INDENT = 2 * " "
COLUMNS = 80  # of a line for a finding, unless the terminal is wider
LEAST = 30  # columns of a detail, whatever the names beside it take
MOST_ROWS = 10  # per kind; JSON has all findings
MOST_SENTENCES, WIDEST = 3, 300  # of a checkpoint, and characters of a line, in a summary
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


def brief(reports: list[Report], runs: list[RunReport], *, markdown: bool) -> str:
    """At most five lines on each run, and on each checkpoint that is in none; as a Markdown list, too."""
    inside = {id(report) for run in runs for report in run.saves}
    blocks = [_brief_run(run) for run in runs]
    blocks += [_brief_save(report) for report in reports if id(report) not in inside]
    lines = [(number, shortened(printable(line), WIDEST)) for block in blocks for number, line in enumerate(block)]
    if markdown:  # text from a checkpoint is code
        lines = [(number, line.replace("`", "'")) for number, line in lines]
        return "\n".join(f"{'  ' if number else ''}- `{line}`" for number, line in lines)
    return "\n".join(line for _, line in lines)


def _brief_run(run: RunReport) -> list[str]:
    bad = next((own for own in run.saves if own.verdict not in TO_RESUME_FROM and own.checkpoint.path.is_dir()), None)
    details = f"details: ckpt-patches audit {shlex.quote(str(bad.checkpoint.path))}" if bad else ""
    return [*filter(None, (f"{run.path}: {headline(run.saves)}", run.as_text(), run.not_whole(), details))]


def _brief_save(report: Report) -> list[str]:
    begin = f"{report.checkpoint.path}: {with_kinds(report)}"
    if report.verdict in TO_RESUME_FROM:
        return [begin]
    return [begin, *(f"{name}: {sentence}" for name, sentence in what_to_do(report, notes=False)[:MOST_SENTENCES])]


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
