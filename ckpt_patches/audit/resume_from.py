"""Find the checkpoint of a run to resume from: newest first, up to the first one that is good.

A save whose structure is damaged is skipped before its elements are read: a missing or truncated file, a contradiction
between files. Only direct saves of a run are candidates, as frameworks load no others.
"""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ckpt_patches.audit.audit import DAMAGED, INCOMPLETE, TO_RESUME_FROM, UNKNOWN, Report, audit, audit_structure
from ckpt_patches.audit.report.rows import rows
from ckpt_patches.audit.run_folder import UNFINISHED, leaves, saves, unit_of
from ckpt_patches.audit.unit import joined
from ckpt_patches.errors import UserError
from ckpt_patches.formats.checkpoint import ALONE, Checkpoint
from ckpt_patches.formats.reading import reader_of
from ckpt_patches.formats.trackers import TRACKERS, Tracker, trackers
from ckpt_patches.formats.universal import is_universal

STEP = re.compile(
    r"(?:iter|step|checkpoint)[-_=]?(\d{1,18})"
)  # in names such as `global_step10`, `epoch=1-step=200.ckpt`
MOST_RUNS = 20  # that an error lists
# Of files that can be checkpoints of their own, such as Lightning's without sharding, which are not read here.
SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors", ".distcp")
SKIPPED_ELSEWHERE = "a link to another folder, which can be of another run; no tracker names it"
SKIPPED_UNIVERSAL = 'a universal checkpoint, which needs "load_universal": true; name its folder to have it considered'
SKIPPED_ALONE = "weights without an optimizer, as of an exported model or of save_only_model"


@dataclass(frozen=True)
class Save:
    """A folder that a run resumes from as one."""

    path: Path
    parts: tuple[Path, ...]  # the checkpoints in it; mostly the folder itself

    @property
    def name(self) -> str:
        return os.path.basename(os.path.abspath(self.path))

    @property
    def step(self) -> int | None:
        """The step in its name, which options of frameworks take; None without one."""
        found = STEP.findall(self.name)
        return int(found[-1]) if found else None

    @cached_property
    def structure(self) -> Report:
        """The report on its structure, read once."""
        return joined(self.path, [audit_structure(part) for part in self.parts])

    @property
    def is_alone(self) -> bool:
        """Whether it is an exported model, without an optimizer."""
        return self.structure.checkpoint.format.endswith(ALONE)

    @property
    def is_universal(self) -> bool:
        return all(part.is_dir() and is_universal(part) for part in self.parts)


@dataclass(frozen=True)
class Skipped:
    """A save that is not the answer."""

    path: Path
    verdict: str  # empty if it was not judged
    reason: str


@dataclass(frozen=True)
class Answer:
    """Which save to resume from, and why not from the newer ones."""

    run: Path  # the folder of the saves
    save: Save | None  # None if none is good
    report: Report | None  # on `save`; only on its structure if nothing else was read
    skipped: tuple[Skipped, ...]
    left: int  # older saves that were not judged, because of the limit
    trackers: tuple[Tracker, ...]
    unknown: Path | None = None  # a file that can be a checkpoint of an unknown format, if no other is there

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing that can be a checkpoint, as before the first start of a run."""
        return not (self.save or self.skipped or self.left or self.unknown)

    @property
    def has_weights_alone(self) -> bool:
        """Whether no save has an optimizer, without which nothing but weights can be loaded."""
        return bool(self.skipped) and all(own.reason == SKIPPED_ALONE for own in self.skipped)

    @property
    def undecided(self) -> Skipped | None:
        """The newest save without damage that is not verified as good, if none is good."""
        return None if self.save else next((own for own in self.skipped if own.verdict == UNKNOWN), None)


def resume_from(
    path: Path,
    workers: int | None = None,
    *,
    quick: bool = False,
    most: int | None = None,
    say: Callable[[Skipped], object] = lambda skipped: None,
) -> Answer:
    """Judge the saves of a run, newest first, up to the first one that is WHOLE or REPAIRED.

    Args:
        path: the folder of a run, or one checkpoint.
        workers: processes that read elements; None for as many as processors.
        quick: judge structure alone: files, sizes, indexes, steps. No element is read.
        most: the number of saves to judge; None for all.
        say: called for each skipped save as soon as it is judged.

    Raises:
        UserError: the folder has several runs.
    """
    run, every = _run_of(path)
    search = _Search(workers, quick, say)
    candidates, others = _candidates(run, every)
    for save, why in others:
        search.skip(save, "", why)
    good: tuple[Save, Report] | None = None
    chosen = candidates[:most]
    for number, save in enumerate(chosen, 1):
        if save.is_alone and save.structure.verdict not in (DAMAGED, INCOMPLETE):
            search.skip(save, "", SKIPPED_ALONE)
        elif good := search.judged(save):
            chosen = chosen[:number]
            break
    left = 0 if good else len(candidates) - len(chosen)
    newest, report = good or (None, None)
    unknown = None if every else _unknown(path)
    return Answer(run, newest, report, tuple(search.skipped), left, tuple(trackers(run)), unknown)


@dataclass(frozen=True)
class _Search:
    """A search for a good save, with the skipped ones."""

    workers: int | None
    quick: bool
    say: Callable[[Skipped], object]
    skipped: list[Skipped] = field(default_factory=list)

    def skip(self, save: Save, verdict: str, reason: str) -> None:
        self.skipped.append(Skipped(save.path, verdict, reason))
        self.say(self.skipped[-1])

    def judged(self, save: Save) -> tuple[Save, Report] | None:
        """A save and the report on it, if it is good; else the save is skipped."""
        found = save.structure
        if not self.quick and found.verdict not in (DAMAGED, INCOMPLETE):
            found = joined(save.path, [audit(part, self.workers) for part in save.parts])
        if found.verdict in TO_RESUME_FROM:
            return save, found
        self.skip(save, found.verdict, _reason(found))
        return None


# Which saves are candidates


def _run_of(path: Path) -> tuple[Path, list[Save]]:
    """The folder of a run, and its saves.

    Raises:
        UserError: there are several runs, and none of them is directly in `path`.
    """
    units: dict[Path, list[Path]] = {}
    for part in saves(path):
        if part.is_dir() or part.name not in TRACKERS:  # a tracker that names nothing is no save
            units.setdefault(unit_of(part, path), []).append(part)
    if [*units] == [path]:
        return path.parent, [Save(path, tuple(units[path]))]
    runs: dict[Path, list[Save]] = {}
    for unit, parts in units.items():
        if unit != path:  # beside others, an exported model
            runs.setdefault(unit.parent, []).append(Save(unit, tuple(parts)))
    if len(runs) > 1:
        if path in runs and _is_run(runs[path]):
            return path, runs[path]
        runs = {folder: own for folder, own in runs.items() if not all(save.is_alone for save in own)} or runs
    if len(runs) > 1:
        names = [str(folder) for folder in runs]
        more = f" and {len(names) - MOST_RUNS} more" if len(names) > MOST_RUNS else ""
        raise UserError(f"{path}: expected one run, found {len(names)}; name one: {' '.join(names[:MOST_RUNS])}{more}")
    return next(iter(runs.items()), (path, []))


def _is_run(own: Iterable[Save]) -> bool:
    """Whether one of the saves is of a known format, and has more than weights."""
    return any(_reader(part) and not save.is_alone for save in own for part in save.parts)


def _reader(path: Path) -> Callable[[Path], Checkpoint] | None:
    try:
        is_finished = path.is_dir() and not path.name.endswith(UNFINISHED)
        return reader_of(path) if is_finished else None
    except OSError:
        return None


def _candidates(run: Path, every: list[Save]) -> tuple[list[Save], list[tuple[Save, str]]]:
    """The saves to judge, newest first; and the others, each with the reason."""
    named = [os.path.realpath(tracker.names) for tracker in trackers(run) if tracker.names]
    reasons: dict[Path, str] = {}
    natives = [save for save in every if save.path.is_dir() and not save.is_universal]
    for save in every if len(every) > 1 else ():
        if leaves(save.path, run) and os.path.realpath(save.path) not in named:
            reasons[save.path] = SKIPPED_ELSEWHERE
        elif natives and save.is_universal:
            reasons[save.path] = SKIPPED_UNIVERSAL
    candidates = [save for save in every if save.path not in reasons]
    others = [(save, reasons[save.path]) for save in every if save.path in reasons]
    return sorted(candidates, key=_age, reverse=True), others


def _age(save: Save) -> tuple[int, float]:
    """Sort key: the step in the name or, without one, of the optimizer; then the time of the last write."""
    step = save.step
    if step is None:
        step = save.structure.checkpoint.step
    return (
        -1 if step is None else step,
        save.path.stat().st_mtime if save.path.exists() else 0,
    )  # a tracker can name one that was deleted


# Judging


def _unknown(path: Path) -> Path | None:
    """A file in a folder without saves, or in the folders in it, that can be a checkpoint by its name."""
    for folder in (path, *(own for own in sorted(path.iterdir()) if own.is_dir())):
        for file in sorted(folder.iterdir()):
            if file.name.endswith(SUFFIXES):
                return file
    return None


def _reason(report: Report) -> str:
    """The first of the findings that decide, and how many others there are."""
    every = rows(report, notes=False)
    if not every:
        return "no tensor is in it"
    first = every[0]
    place = "" if first.where == str(report.checkpoint.path) else first.where
    text = " ".join(filter(None, (first.kind.name, f"{place}:" if place and first.detail else place, first.detail)))
    return f"{text}, and {len(every) - 1} more" if len(every) > 1 else text
