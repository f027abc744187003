"""Report on a run's folder: which checkpoint to resume from, and what the trackers name."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_patches.audit.audit import TO_RESUME_FROM, Report
from ckpt_patches.audit.run_folder import Tracker, leaves, save_of, trackers
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
            step = self.newest.checkpoint.step
            save = save_of(self.newest.checkpoint.path)
            begin = f"resume from: {save}" + (f" (step {step})" if step is not None else "")
        named = [self._of(one) for one in self.named] or ["no tracker names a checkpoint"]
        if self.elsewhere:
            named.append(f"not considered, as it is a link to another folder: {self.elsewhere[0].name}")
        return "; ".join((begin, *named))

    def _of(self, named: Named) -> str:
        tracker, names = named.tracker.path.name, named.tracker.names
        if names is None:
            return f"{tracker} names no checkpoint"
        if self.newest and _same(save_of(self.newest.checkpoint.path), names):
            return f"{tracker} names it"
        return f"{tracker} names {names.name}" + (f", which is {named.verdict}" if named.verdict else "")

    def as_json(self) -> dict[str, Any]:
        """The entry in `audit --json`: docs/json.md."""
        return {
            "path": str(self.path),
            "resume_from": None if self.newest is None else str(save_of(self.newest.checkpoint.path)),
            "step": None if self.newest is None else self.newest.checkpoint.step,
            "trackers": [_as_json(one) for one in self.named],
        }


def _as_json(named: Named) -> dict[str, Any]:
    path, names = named.tracker
    return {"name": path.name, "names": None if names is None else str(names), "verdict": named.verdict or None}


def run_report(path: Path, reports: Iterable[Report]) -> RunReport | None:
    """Report on a folder in which checkpoints were audited; None if it is a checkpoint itself."""
    own = [report for report in reports if path in report.checkpoint.path.parents]
    if not own:
        return None
    damaged = {save_of(report.checkpoint.path) for report in own if report.verdict not in TO_RESUME_FROM}
    complete = [report for report in own if save_of(report.checkpoint.path) not in damaged]
    if any(not _is_alone(report) for report in own):  # a run does not resume from an exported model
        complete = [report for report in complete if not _is_alone(report)]
    found = [tracker for folder in _folders(path, own) for tracker in trackers(folder)]
    named = tuple(Named(tracker, _verdict(tracker, own)) for tracker in found)
    promised = [tracker.names for tracker in found if tracker.names is not None]
    inside, elsewhere = [], []
    for report in complete:
        save = save_of(report.checkpoint.path)
        is_linked = leaves(save, path) and not any(_same(save, one) for one in promised)
        (elsewhere if is_linked else inside).append(report)
    newest = max(inside, key=_order, default=None)
    return RunReport(path, newest, named, tuple(save_of(report.checkpoint.path) for report in elsewhere))


def _is_alone(report: Report) -> bool:
    return report.checkpoint.format.endswith(ALONE)


def _order(report: Report) -> tuple[int, float]:
    """Sort key: the step (-1 without one), then the time of the last write."""
    step = report.checkpoint.step
    return -1 if step is None else step, report.checkpoint.path.stat().st_mtime


def _folders(path: Path, reports: Iterable[Report]) -> list[Path]:
    """The folders that hold checkpoints and so can have trackers."""
    return sorted({path, *(save_of(report.checkpoint.path).parent for report in reports)})


def _verdict(tracker: Tracker, reports: Iterable[Report]) -> str:
    if tracker.names is None:
        return ""
    found = [report.verdict for report in reports if _same(save_of(report.checkpoint.path), tracker.names)]
    return next((verdict for verdict in found if verdict not in TO_RESUME_FROM), found[0] if found else "")


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
