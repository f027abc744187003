"""Report on a run's folder: which checkpoint to resume from, and what the trackers name."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_patches.audit.audit import TO_RESUME_FROM, Report
from ckpt_patches.audit.run_folder import Tracker, leaves, trackers
from ckpt_patches.formats.checkpoint import ALONE


@dataclass(frozen=True)
class Named:
    """A checkpoint that a tracker names."""

    tracker: Tracker
    verdict: str  # empty if the tracker names no folder, or one that was not audited


@dataclass(frozen=True)
class RunReport:
    """The report on a run's folder."""

    path: Path
    newest: Report | None  # complete checkpoint, or None
    named: tuple[Named, ...]
    elsewhere: tuple[Path, ...] = ()  # links to complete checkpoints that can be of another run

    def as_text(self) -> str:
        """The report in one line."""
        if self.newest is None:
            begin = f"resume from: no checkpoint in {self.path} is complete"
        else:
            found = self.newest.checkpoint
            begin = f"resume from: {found.path}" + (f" (step {found.step})" if found.step is not None else "")
        named = [self._of(one) for one in self.named] or ["no tracker names a checkpoint"]
        if self.elsewhere:
            named.append(f"not considered, as it is a link to another folder: {self.elsewhere[0].name}")
        return "; ".join((begin, *named))

    def _of(self, named: Named) -> str:
        tracker, names = named.tracker.path.name, named.tracker.names
        if names is None:
            return f"{tracker} names no checkpoint"
        if self.newest and _same(self.newest.checkpoint.path, names):
            return f"{tracker} names it"
        return f"{tracker} names {names.name}" + (f", which is {named.verdict}" if named.verdict else "")

    def as_json(self) -> dict[str, Any]:
        """The entry in `audit --json`: docs/json.md."""
        return {
            "path": str(self.path),
            "resume_from": None if self.newest is None else str(self.newest.checkpoint.path),
            "step": None if self.newest is None else self.newest.checkpoint.step,
            "trackers": [_as_json(one) for one in self.named],
        }


def _as_json(named: Named) -> dict[str, Any]:
    path, names = named.tracker
    return {"name": path.name, "names": None if names is None else str(names), "verdict": named.verdict or None}


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
    complete = [report for report in own if report.verdict in TO_RESUME_FROM]
    if not all(map(_is_alone, own)):  # a run does not resume from an exported model
        complete = [report for report in complete if not _is_alone(report)]
    found = trackers(path)
    named = tuple(Named(tracker, _verdict(tracker, own)) for tracker in found)
    promised = [tracker.names for tracker in found if tracker.names is not None]
    inside, elsewhere = [], []
    for report in complete:
        save = report.checkpoint.path
        is_linked = leaves(save, path) and not any(_same(save, one) for one in promised)
        (elsewhere if is_linked else inside).append(report)
    newest = max(inside, key=_order, default=None)
    return RunReport(path, newest, named, tuple(report.checkpoint.path for report in elsewhere))


def _is_alone(report: Report) -> bool:
    return report.checkpoint.format.endswith(ALONE)


def _order(report: Report) -> tuple[int, float]:
    """Sort key: the step (-1 without one), then the time of the last write."""
    step = report.checkpoint.step
    return -1 if step is None else step, report.checkpoint.path.stat().st_mtime


def _verdict(tracker: Tracker, reports: Iterable[Report]) -> str:
    names = tracker.names
    return "" if names is None else next((r.verdict for r in reports if _same(r.checkpoint.path, names)), "")


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
