"""At most five lines on a run or a checkpoint, for a chat or the summary of a job; as a Markdown list, too."""

import itertools
import shlex
from collections.abc import Iterable

from ckpt_patches.audit.audit import DAMAGED, TO_RESUME_FROM, Report
from ckpt_patches.audit.report.rows import headline, rows, what_to_do
from ckpt_patches.audit.report.run_report import RunReport, how_to_load
from ckpt_patches.runtime.shown import printable, shortened

MOST = 3  # checkpoints that a line names
WIDEST = 300  # characters of a line


def brief(reports: list[Report], runs: list[RunReport], *, markdown: bool) -> str:
    """The lines on each run, and on each checkpoint that is in none."""
    inside = {report.checkpoint.path for report in reports for run in runs if is_in(report, run)}
    blocks = [_of_run(run, [report for report in reports if is_in(report, run)]) for run in runs]
    blocks += [_of_checkpoint(report) for report in reports if report.checkpoint.path not in inside]
    return "\n".join(_as_list(block) if markdown else "\n".join(block) for block in blocks)


def is_in(report: Report, run: RunReport) -> bool:
    return report.checkpoint.path.parent == run.path


def _of_run(run: RunReport, own: list[Report]) -> list[str]:
    lines = [f"{run.path}: {headline(own)}", run.as_text()]
    lines += [line] if (line := not_whole(own)) else []
    there = [one.checkpoint.path for one in own if one.verdict not in TO_RESUME_FROM and one.checkpoint.path.is_dir()]
    lines += [f"details: ckpt-patches audit {shlex.quote(str(there[0]))}"] if there else []
    return [shortened(printable(line), WIDEST) for line in lines]


def not_whole(own: list[Report]) -> str:
    """The first checkpoints that are not good, with what was found; empty if all are."""
    bad = [report for report in own if report.verdict not in TO_RESUME_FROM]
    named = ", ".join(f"{report.checkpoint.path.name} ({_kinds(report)})" for report in bad[:MOST])
    more = f", and {len(bad) - MOST} more" if len(bad) > MOST else ""
    return f"not WHOLE: {named}{more}" if bad else ""


def next_steps(run: RunReport, own: Iterable[Report]) -> list[str]:
    """What to do now, with the commands; `own` are the saves of the run, the newest first."""
    newer = [*itertools.takewhile(lambda report: report is not run.newest, own)]
    lines = []
    if run.newest:
        how = how_to_load(run.newest.checkpoint.path, run.newest.checkpoint.format)
        lines += [f"Load it: {how}"] if how else []
        lines.append(f"In a script: ckpt-patches resume-from {shlex.quote(str(run.path))} prints its path")
    elif run.undecided:
        lines.append(f"Read below what could not be judged in {run.undecided.checkpoint.path.name} before you load it")
    older = f" --from {shlex.quote(str(run.newest.checkpoint.path))}" if run.newest else ""
    if damaged := next((str(report.checkpoint.path) for report in newer if _has_remedy(report)), None):
        lines.append(f"To repair a newer one: ckpt-patches repair {shlex.quote(damaged)} --output NEW{older}")
    if not lines and run.has_weights_alone:
        return ["Take a save with an optimizer: a training from weights alone starts its optimizer anew"]
    return lines or ["Take a copy of an older checkpoint: no save here is complete, and none can be repaired"]


def _has_remedy(report: Report) -> bool:
    return report.verdict == DAMAGED and any(own.kind.remedy.startswith("repair") for own in report.findings)


def _of_checkpoint(report: Report) -> list[str]:
    lines = [f"{report.checkpoint.path}: {report.verdict}"]
    if report.verdict not in TO_RESUME_FROM:
        lines = [f"{report.checkpoint.path}: {_kinds(report)}"]
        lines += [f"{name}: {sentence}" for name, sentence in what_to_do(report, notes=False)[:MOST]]
    return [shortened(printable(line), WIDEST) for line in lines]


def _kinds(report: Report) -> str:
    """The verdict and the names of the kinds of finding, the cause first."""
    names = [*dict.fromkeys(row.kind.name for row in rows(report, notes=False))]
    return f"{report.verdict}: {', '.join([*names[:MOST], *(['…'] if len(names) > MOST else [])])}"


def _as_list(lines: Iterable[str]) -> str:
    """A Markdown item with the other lines below it; text from a checkpoint is code."""
    first, *others = (line.replace("`", "'") for line in lines)
    return "\n".join([f"- `{first}`", *(f"  - `{line}`" for line in others)])
