"""Report on a run's folder: which checkpoint to resume from, what the trackers name, and what to do."""

import itertools
import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_patches.audit.audit import DAMAGED, TO_RESUME_FROM, Report
from ckpt_patches.audit.repair.plan import REPAIRABLE
from ckpt_patches.audit.report.rows import rows
from ckpt_patches.audit.resume_from import SKIPPED_ELSEWHERE, SKIPPED_UNIVERSAL, Answer, Save, choose, how_to_load
from ckpt_patches.audit.run_folder import saves
from ckpt_patches.formats.checkpoint import ALONE
from ckpt_patches.formats.trackers import TRACKERS, Tracker

MOST = 3  # checkpoints, or kinds of finding, that a line names


@dataclass(frozen=True)
class RunReport:
    """The report on a run's folder."""

    answer: Answer
    saves: tuple[Report, ...]  # newest first

    @property
    def path(self) -> Path:
        return self.answer.run

    @property
    def newest(self) -> Report | None:
        """The newest of the complete checkpoints."""
        return self.answer.report

    def as_text(self) -> str:
        """The report in one line."""
        alone, undecided = self.answer.has_weights_alone, self.answer.undecided
        none = (
            "has an optimizer" if alone else "that loads as it is, is WHOLE" if self._good_universal() else "is WHOLE"
        )
        parts = [f"no checkpoint in {self.path} {none}"]
        if self.newest:
            step = self.newest.checkpoint.step
            parts = [f"{self.newest.checkpoint.path}" + (f" (step {step})" if step is not None else "")]
        if undecided:
            parts.append(f"the newest without damage is {undecided.path.name}, which is UNKNOWN")
        parts += [self._of(tracker) for tracker in self.answer.trackers] or ["no tracker names a checkpoint"]
        if elsewhere := [own.path for own in self.answer.skipped if own.reason == SKIPPED_ELSEWHERE]:
            parts.append(f"not considered, as it is a link to another folder: {elsewhere[0].name}")
        if universal := self._good_universal():
            parts.append(f'not considered, as it needs "load_universal": true: {universal.checkpoint.path.name}')
        return f"resume from: {'; '.join(parts)}"

    def _of(self, tracker: Tracker) -> str:
        name, names = tracker.path.name, tracker.names
        if names is None:
            return f"{name} names no checkpoint"
        if self.newest and _same(self.newest.checkpoint.path, names):
            return f"{name} names it"
        verdict = self._verdict(names)
        return f"{name} names {names.name}" + (f", which is {verdict}" if verdict else "")

    def _verdict(self, save: Path | None) -> str:
        """The verdict on what a tracker names; empty if that was not audited."""
        return next((own.verdict for own in self.saves if save and _same(own.checkpoint.path, save)), "")

    def _good_universal(self) -> Report | None:
        """The newest good universal checkpoint that is not the answer because a load needs an option for it."""
        skipped = {own.path for own in self.answer.skipped if own.reason == SKIPPED_UNIVERSAL}
        own = [save for save in self.saves if save.checkpoint.path in skipped and save.verdict in TO_RESUME_FROM]
        return own[0] if own and not self.newest else None

    def not_whole(self) -> str:
        """The first checkpoints that are not good, with what was found; empty if all are."""
        bad = [report for report in self.saves if report.verdict not in TO_RESUME_FROM]
        named = ", ".join(f"{report.checkpoint.path.name} ({with_kinds(report)})" for report in bad[:MOST])
        more = f", and {len(bad) - MOST} more" if len(bad) > MOST else ""
        return f"not WHOLE: {named}{more}" if bad else ""

    def next_steps(self) -> list[str]:
        """What to do now, with the commands."""
        lines, good = list[str](), None
        if self.newest:
            good = self.newest.checkpoint.path
            lines += [f"Load it: {how}"] if (how := how_to_load(good, self.newest.checkpoint.format)) else []
            lines.append(f"In a script: ckpt-patches resume-from {shlex.quote(str(self.path))} prints its path")
        elif undecided := self.answer.undecided:
            lines.append(f"Read below what could not be judged in {undecided.path.name} before you load it")
        newer = itertools.takewhile(lambda report: report is not self.newest, self.saves)
        if damaged := next((report for report in newer if _can_be_repaired(report)), None):
            path, unit = _to_repair(damaged), damaged.checkpoint.path
            source = good and good / path.relative_to(unit)
            older = f" --from {shlex.quote(str(source)) if source.is_dir() else 'OLDER'}" if source else ""
            lines.append(f"To repair a newer one: ckpt-patches repair {shlex.quote(str(path))} --output NEW{older}")
        if not self.newest and (universal := self._good_universal()):
            lines.append(f"Load it: {how_to_load(universal.checkpoint.path, universal.checkpoint.format)}")
        if not lines and self.answer.has_weights_alone:
            return ["Take a save with an optimizer: a training from weights alone starts its optimizer anew"]
        return lines or ["Take a copy of an older checkpoint: no save here is complete, and none can be repaired"]

    def as_json(self) -> dict[str, Any]:
        """The entry in `audit --json`: docs/reference/json.md."""
        return {
            "path": str(self.path),
            "resume_from": self.newest and str(self.newest.checkpoint.path),
            "step": self.newest and self.newest.checkpoint.step,
            "undecided": self.answer.undecided and str(self.answer.undecided.path),
            "trackers": [
                {"name": path.name, "names": names and str(names), "verdict": self._verdict(names) or None}
                for path, names in self.answer.trackers
            ],
        }


def _can_be_repaired(report: Report) -> bool:
    return report.verdict == DAMAGED and any(own.kind in REPAIRABLE for own in report.findings)


def _to_repair(report: Report) -> Path:
    """The checkpoint with the damage: of a folder from which a run resumes as one, it can be one of several in it."""
    unit = report.checkpoint.path
    damaged = [own.array for own in report.findings if own.kind in REPAIRABLE]
    below = [part for part in reversed(saves(unit)) if unit in part.parents]
    return next((own for own in below for name in damaged if name.startswith(f"{own.relative_to(unit)}/")), unit)


def with_kinds(report: Report) -> str:
    """The verdict and, unless it is good, the names of the kinds of finding, the cause first."""
    if report.verdict in TO_RESUME_FROM:
        return report.verdict
    names = [*dict.fromkeys(row.kind.name for row in rows(report, notes=False))]
    return f"{report.verdict}: {', '.join([*names[:MOST], *(['…'] if len(names) > MOST else [])])}"


def run_reports(path: Path, reports: Iterable[Report]) -> list[RunReport]:
    """Report on each folder, at or below `path`, that holds audited checkpoints. None for a checkpoint itself.

    Folders with exported models alone, from which no run resumes, are left out beside others.
    """
    runs: dict[Path, list[Report]] = {}
    for report in reports:
        if path in report.checkpoint.path.parents:
            runs.setdefault(report.checkpoint.path.parent, []).append(report)
    to_resume = {folder: own for folder, own in runs.items() if not all(map(_is_alone, own))}
    return [RunReport(_answer(folder, own), tuple(own)) for folder, own in (to_resume or runs).items()]


def _answer(run: Path, reports: Iterable[Report]) -> Answer:
    saves = [Save(report.checkpoint.path, (report.checkpoint.path,), report) for report in reports]
    return choose(run, [save for save in saves if save.path.is_dir() or save.name not in TRACKERS])


def _is_alone(report: Report) -> bool:
    return report.checkpoint.format.endswith(ALONE)


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
