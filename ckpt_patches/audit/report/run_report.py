"""Report on a run's folder: which checkpoint to resume from, what the trackers name, and what to do."""

import itertools
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_patches.audit.audit import DAMAGED, TO_RESUME_FROM, UNKNOWN, Report
from ckpt_patches.audit.repair.plan import REPAIRABLE
from ckpt_patches.audit.report.rows import rows
from ckpt_patches.audit.run_folder import leaves
from ckpt_patches.formats.checkpoint import ALONE
from ckpt_patches.formats.trackers import Tracker, trackers
from ckpt_patches.formats.universal import is_universal

OF_MEGATRON, OF_TRAINER = re.compile(r"iter_\d{7,}"), re.compile(r"checkpoint-\d+")
MOST = 3  # checkpoints, or kinds of finding, that a line names


@dataclass(frozen=True)
class RunReport:
    """The report on a run's folder."""

    path: Path
    saves: tuple[Report, ...]  # newest first
    newest: Report | None  # of the complete checkpoints
    undecided: Report | None  # the newest one without damage, if none is complete
    trackers: tuple[tuple[Tracker, str], ...]  # each with the verdict; empty if it names none that was audited
    elsewhere: tuple[Path, ...]  # links to complete checkpoints that can be of another run
    has_weights_alone: bool = False  # in every checkpoint: none can be resumed from

    def as_text(self) -> str:
        """The report in one line."""
        parts = [f"no checkpoint in {self.path} {'has an optimizer' if self.has_weights_alone else 'is WHOLE'}"]
        if self.newest:
            step = self.newest.checkpoint.step
            parts = [f"{self.newest.checkpoint.path}" + (f" (step {step})" if step is not None else "")]
        if self.undecided:
            parts.append(f"the newest without damage is {self.undecided.checkpoint.path.name}, which is UNKNOWN")
        parts += [self._of(*one) for one in self.trackers] or ["no tracker names a checkpoint"]
        if self.elsewhere:
            parts.append(f"not considered, as it is a link to another folder: {self.elsewhere[0].name}")
        return f"resume from: {'; '.join(parts)}"

    def _of(self, tracker: Tracker, verdict: str) -> str:
        name, names = tracker.path.name, tracker.names
        if names is None:
            return f"{name} names no checkpoint"
        if self.newest and _same(self.newest.checkpoint.path, names):
            return f"{name} names it"
        return f"{name} names {names.name}" + (f", which is {verdict}" if verdict else "")

    def not_whole(self) -> str:
        """The first checkpoints that are not good, with what was found; empty if all are."""
        bad = [report for report in self.saves if report.verdict not in TO_RESUME_FROM]
        named = ", ".join(f"{report.checkpoint.path.name} ({with_kinds(report)})" for report in bad[:MOST])
        more = f", and {len(bad) - MOST} more" if len(bad) > MOST else ""
        return f"not WHOLE: {named}{more}" if bad else ""

    def next_steps(self) -> list[str]:
        """What to do now, with the commands."""
        lines, older = [], ""
        if self.newest:
            good = self.newest.checkpoint.path
            older = f" --from {shlex.quote(str(good))}"
            lines += [f"Load it: {how}"] if (how := how_to_load(good, self.newest.checkpoint.format)) else []
            lines.append(f"In a script: ckpt-patches resume-from {shlex.quote(str(self.path))} prints its path")
        elif self.undecided:
            name = self.undecided.checkpoint.path.name
            lines.append(f"Read below what could not be judged in {name} before you load it")
        newer = itertools.takewhile(lambda report: report is not self.newest, self.saves)
        if damaged := next((str(report.checkpoint.path) for report in newer if _can_be_repaired(report)), None):
            lines.append(f"To repair a newer one: ckpt-patches repair {shlex.quote(damaged)} --output NEW{older}")
        if not lines and self.has_weights_alone:
            return ["Take a save with an optimizer: a training from weights alone starts its optimizer anew"]
        return lines or ["Take a copy of an older checkpoint: no save here is complete, and none can be repaired"]

    def as_json(self) -> dict[str, Any]:
        """The entry in `audit --json`: docs/reference/json.md."""
        return {
            "path": str(self.path),
            "resume_from": self.newest and str(self.newest.checkpoint.path),
            "step": self.newest and self.newest.checkpoint.step,
            "undecided": self.undecided and str(self.undecided.checkpoint.path),
            "trackers": [
                {"name": path.name, "names": names and str(names), "verdict": verdict or None}
                for (path, names), verdict in self.trackers
            ],
        }


def _can_be_repaired(report: Report) -> bool:
    return report.verdict == DAMAGED and any(own.kind in REPAIRABLE for own in report.findings)


def with_kinds(report: Report) -> str:
    """The verdict and, unless it is good, the names of the kinds of finding, the cause first."""
    if report.verdict in TO_RESUME_FROM:
        return report.verdict
    names = [*dict.fromkeys(row.kind.name for row in rows(report, notes=False))]
    return f"{report.verdict}: {', '.join([*names[:MOST], *(['…'] if len(names) > MOST else [])])}"


def how_to_load(save: Path, checkpoint_format: str) -> str:
    """The option of the framework that loads a save; empty if that depends on the script."""
    if OF_MEGATRON.fullmatch(save.name):
        return f"--load {shlex.quote(str(save.parent))} --ckpt-step {int(save.name.removeprefix('iter_'))}"
    if OF_TRAINER.fullmatch(save.name):
        return f"resume_from_checkpoint={str(save)!r}"
    if is_universal(save):
        return f'tag {save.name} in {save.parent}, with "load_universal": true'
    return f"tag {save.name} in {save.parent}" if checkpoint_format.startswith("deepspeed") else ""


def run_reports(path: Path, reports: Iterable[Report]) -> list[RunReport]:
    """Report on each folder, at or below `path`, that holds audited checkpoints. None for a checkpoint itself.

    Folders with exported models alone, from which no run resumes, are left out beside others.
    """
    runs: dict[Path, list[Report]] = {}
    for report in reports:
        if path in report.checkpoint.path.parents:
            runs.setdefault(report.checkpoint.path.parent, []).append(report)
    to_resume = {folder: own for folder, own in runs.items() if not all(map(_is_alone, own))}
    return [_run_report(folder, own) for folder, own in (to_resume or runs).items()]


def _run_report(path: Path, own: list[Report]) -> RunReport:
    found = trackers(path)
    named = [os.path.realpath(tracker.names) for tracker in found if tracker.names]
    to_resume = [report for report in own if not _is_alone(report)]
    complete = [report for report in to_resume if report.verdict in TO_RESUME_FROM]
    paths = [report.checkpoint.path for report in complete]
    elsewhere = tuple(save for save in paths if leaves(save, path) and os.path.realpath(save) not in named)
    newest = max((own for own in complete if own.checkpoint.path not in elsewhere), key=_order, default=None)
    undecided = [own for own in to_resume if own.verdict == UNKNOWN and own.checkpoint.shards and not newest]
    verdicts = tuple((tracker, _verdict(tracker, own)) for tracker in found)
    # What a damaged save had is not known.
    has_alone = not to_resume and all(report.verdict in TO_RESUME_FROM for report in own)
    doubt = max(undecided, key=_order, default=None)
    return RunReport(path, tuple(own), newest, doubt, verdicts, elsewhere, has_alone)


def _is_alone(report: Report) -> bool:
    return report.checkpoint.format.endswith(ALONE)


def _order(report: Report) -> tuple[int, float]:
    """Sort key: the step (-1 without one), then the time of the last write."""
    step, path = report.checkpoint.step, report.checkpoint.path
    return -1 if step is None else step, path.stat().st_mtime if path.exists() else 0  # it can be deleted meanwhile


def _verdict(tracker: Tracker, reports: Iterable[Report]) -> str:
    names = tracker.names
    return "" if names is None else next((r.verdict for r in reports if _same(r.checkpoint.path, names)), "")


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
