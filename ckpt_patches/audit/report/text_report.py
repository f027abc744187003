"""Report an audit as a text table or as JSON."""

from typing import Any

from ckpt_patches.audit.audit import DAMAGED, INCOMPLETE, REPAIRED, WHOLE, Report
from ckpt_patches.audit.report.run_report import RunReport
from ckpt_patches.formats.damages import NOTE, Finding
from ckpt_patches.runtime.shown import printable, shortened
from ckpt_patches.runtime.terminal import paint
from ckpt_patches.runtime.units import in_bytes

SCHEMA = 2  # of the JSON; raised when a key changes its meaning or is removed
COLORS = {DAMAGED: "red", INCOMPLETE: "red", WHOLE: "green", REPAIRED: "green"}  # of verdicts
MOST_LINES = 20  # per kind in a table; JSON has all


def as_json(reports: list[Report], runs: list[RunReport]) -> dict[str, Any]:
    """The schema is documented in docs/json.md."""
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
    """The verdict and a line for each finding; notes only if `notes` is set."""
    verdict = paint(report.verdict, COLORS.get(report.verdict, "yellow"))
    if report.verdict == REPAIRED:
        verdict += f", {report.repaired} elements are not the run's own"
    lines = [f"{printable(str(report.checkpoint.path))}: {verdict} ({about(report)})"]
    shown = [finding for finding in report.findings if notes or finding.kind.severity != NOTE]
    rows = [row for name in dict.fromkeys(f.kind.name for f in shown) for row in _rows(name, shown)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"  {'  '.join(cells)}".rstrip())
    for kind in dict.fromkeys(finding.kind for finding in shown):
        lines.append(f"  {kind.name}: {kind.meaning}; {kind.remedy}")
    hidden = len(report.findings) - len(shown)
    if hidden:
        lines.append(f"  and {hidden} notes (--notes)")
    return "\n".join(lines)


def about(report: Report) -> str:
    """The format, size, step and ranks of a checkpoint."""
    found = report.checkpoint
    known = [found.format, in_bytes(found.nbytes)]
    known += [f"step {found.step}"] if found.step is not None else []
    known += [f"{found.data_parallel} data-parallel ranks"] if found.data_parallel else []
    return ", ".join(known)


def _rows(name: str, findings: list[Finding]) -> list[tuple[str, ...]]:
    own = [finding for finding in findings if finding.kind.name == name]
    rows: list[tuple[str, ...]] = [
        (f.kind.severity, name, printable(f.array), printable(f.shard), in_range(f), printable(f.detail))
        for f in own[:MOST_LINES]
    ]
    if len(own) > MOST_LINES:
        rows.append(("", name, f"and {len(own) - MOST_LINES} more", "", "", ""))
    return rows


def in_range(finding: Finding) -> str:
    """The half-open range of elements in the shard."""
    return "" if finding.begin is None else f"[{finding.begin}, {finding.end})"
