"""Choose the checkpoint of a run to resume from: newest first, up to the first one that is good.

A save whose structure is damaged is skipped before its elements are read: a missing or truncated file, a contradiction
between files. Only direct saves of a run are candidates, as frameworks load no others. An audit of a run has judged
all of its saves, and chooses by the same rules.
"""

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ckpt_patches.audit.audit import DAMAGED, INCOMPLETE, TO_RESUME_FROM, UNKNOWN, Report, audit, audit_structure
from ckpt_patches.audit.report.rows import rows
from ckpt_patches.audit.run_folder import UNFINISHED, leaves, runs
from ckpt_patches.audit.unit import joined
from ckpt_patches.errors import UserError
from ckpt_patches.formats.checkpoint import ALONE
from ckpt_patches.formats.reading import reader_of
from ckpt_patches.formats.trackers import TRACKERS, Tracker, trackers
from ckpt_patches.formats.universal import is_universal

SCHEMA = 1  # of the JSON; raised when a key changes its meaning or is removed
# In names such as `global_step10`, `epoch=1-step=200.ckpt`.
STEP = re.compile(r"(?:iter|step|checkpoint)[-_=]?(\d{1,18})")
OF_MEGATRON, OF_TRAINER = re.compile(r"iter_\d{7,}"), re.compile(r"checkpoint-\d+")
OF_UNIVERSAL = "latest_universal"  # the tracker that DeepSpeed reads with "load_universal"
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
    report: Report | None = None  # if it has been judged already

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
        return self.report or joined(self.path, [audit_structure(part) for part in self.parts])

    def judged(self, workers: int | None) -> Report:
        """The report on all of it."""
        return self.report or joined(self.path, [audit(part, workers) for part in self.parts])

    @property
    def is_alone(self) -> bool:
        """Whether it is an exported model, without an optimizer."""
        return self.structure.checkpoint.format.endswith(ALONE)

    @property
    def is_universal(self) -> bool:
        return all(part.is_dir() and is_universal(part) for part in self.parts)

    @property
    def age(self) -> tuple[int, float]:
        """Sort key: the step in the name or, without one, of the optimizer; then the time of the last write."""
        step = self.structure.checkpoint.step if self.step is None else self.step
        written = self.path.stat().st_mtime if self.path.exists() else 0  # a tracker can name one that was deleted
        return -1 if step is None else step, written


@dataclass(frozen=True)
class Skipped:
    """A save that is not the answer."""

    path: Path
    verdict: str  # empty if it was not judged
    reason: str

    def __str__(self) -> str:
        return f"skipped {self.path}: {f'{self.verdict}: ' if self.verdict else ''}{self.reason}"


@dataclass(frozen=True)
class Answer:
    """Which save to resume from, and why not from the newer ones."""

    run: Path  # the folder of the saves
    quick: bool = False  # only structure was judged
    save: Save | None = None  # None if none is good
    report: Report | None = None  # on `save`
    skipped: tuple[Skipped, ...] = ()
    left: int = 0  # older saves that were not judged, because of the limit
    trackers: tuple[Tracker, ...] = ()
    unknown: Path | None = None  # a file that can be a checkpoint of an unknown format, if no other is there

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing that can be a checkpoint, as before the first start of a run."""
        return not (self.save or self.skipped or self.left or self.unknown)

    @property
    def undecided(self) -> Skipped | None:
        """The newest save without damage that is not verified as good, if none is good."""
        return None if self.save else next((own for own in self.skipped if own.verdict == UNKNOWN), None)

    @property
    def has_weights_alone(self) -> bool:
        """Whether all that was read has no optimizer: a training cannot go on from it."""
        return bool(self.skipped) and all(own.reason == SKIPPED_ALONE for own in self.skipped)

    def lines(self) -> list[str]:
        """What to know about the answer; if there is none, the last line has the reason."""
        if self.save is None or self.report is None:
            return [*(["structure only, no element was read"] if self.quick else []), self._why_none()]
        found = f"{self.save.path}: {self.report.verdict}"
        if self.quick:
            found = f"structure only, no element was read: {self.save.path}"
        how = how_to_load(self.save.path, self.report.checkpoint.format)
        said = [f"{found}; {how}" if how else found]
        here = os.path.realpath(self.save.path)
        for file, names in self.trackers:
            is_read = (file.name == OF_UNIVERSAL) == self.save.is_universal  # by the load
            if is_read and (names is None or os.path.realpath(names) != here):
                named = names.name if names else "no checkpoint"
                said.append(f"{file.name} names {named}, not this one: a load without its name would take that")
        return said

    def _why_none(self) -> str:
        if self.unknown:
            return f"no checkpoint of a known format in {self.run}, but {self.unknown}"
        none = f"no checkpoint in {self.run}"
        if not self.skipped:
            return none
        limit = f"; {self.left} older ones were not read (--max)" if self.left else ""
        if self.has_weights_alone:
            every = "all that were read" if self.left else "all"
            why = f"{every} have weights without an optimizer, with which a training starts anew"
            return f"{none} can be resumed from: {why}{limit}; the newest is {self.skipped[0].path}"
        if self.undecided:
            which = f"{self.undecided.path}, which is {self.undecided.verdict}: {self.undecided.reason}"
            where = " in its structure" if self.quick else ""
            return f"{none} is verified as good{limit}; the newest without damage{where} is {which}"
        all_of = ", all are damaged or incomplete" if all(own.verdict for own in self.skipped) else ""
        return f"{none} is verified as good{all_of}{limit}"

    def as_json(self) -> dict[str, Any]:
        """The keys of `resume-from --json`: docs/reference/json.md."""
        save, undecided = self.save, self.undecided
        return {
            "schema": SCHEMA,
            "run": str(self.run),
            "structure_only": self.quick,
            "resume_from": save and str(save.path),
            "tag": save and save.name,
            "step": save and save.step,
            "undecided": undecided and str(undecided.path),
            "skipped": [
                {"path": str(own.path), "verdict": own.verdict or None, "reason": own.reason} for own in self.skipped
            ],
            "left": self.left,
            "trackers": [{"name": file.name, "names": names and str(names)} for file, names in self.trackers],
        }


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
    answer = choose(run, every, workers, quick=quick, most=most, say=say)
    return answer if every else replace(answer, unknown=_unknown(path))


def choose(
    run: Path,
    every: Sequence[Save],
    workers: int | None = None,
    *,
    quick: bool = False,
    most: int | None = None,
    say: Callable[[Skipped], object] = lambda skipped: None,
) -> Answer:
    """The same for the saves of one run."""
    found = tuple(trackers(run))
    skipped: list[Skipped] = []

    def skip(save: Save, verdict: str, reason: str) -> None:
        skipped.append(Skipped(save.path, verdict, reason))
        say(skipped[-1])

    candidates = []
    for save, reason in _why_not(run, every, found):
        if reason:
            skip(save, "", reason)
        else:
            candidates.append(save)
    candidates.sort(key=lambda save: save.age, reverse=True)
    for save in candidates[:most]:
        report = save.structure
        if report.verdict in TO_RESUME_FROM and save.is_alone:
            skip(save, "", SKIPPED_ALONE)
            continue
        if report.verdict not in (DAMAGED, INCOMPLETE) and not quick:
            report = save.judged(workers)
        if report.verdict in TO_RESUME_FROM:
            return Answer(run, quick, save, report, tuple(skipped), 0, found)
        skip(save, report.verdict, _reason(report))
    return Answer(run, quick, None, None, tuple(skipped), len(candidates) - len(candidates[:most]), found)


def _run_of(path: Path) -> tuple[Path, list[Save]]:
    """The folder of a run, and its saves.

    Raises:
        UserError: there are several runs, and none of them is directly in `path`.
    """
    every = []
    for unit, parts in (one for run in runs(path).values() for one in run.items()):
        if own := tuple(part for part in parts if part.is_dir() or part.name not in TRACKERS):
            every.append(Save(unit, own))  # a tracker that names nothing is no save
    if [save.path for save in every] == [path]:
        return path.parent, every
    found: dict[Path, list[Save]] = {}
    for save in every:
        if save.path != path:  # beside others, an exported model
            found.setdefault(save.path.parent, []).append(save)
    if len(found) > 1:
        if path in found and _is_run(found[path]):
            return path, found[path]
        found = {folder: own for folder, own in found.items() if not all(save.is_alone for save in own)} or found
    if len(found) > 1:
        names = [str(folder) for folder in found]
        more = f" and {len(names) - MOST_RUNS} more" if len(names) > MOST_RUNS else ""
        raise UserError(f"{path}: expected one run, found {len(names)}; name one: {' '.join(names[:MOST_RUNS])}{more}")
    return next(iter(found.items()), (path, []))


def _is_run(own: Iterable[Save]) -> bool:
    """Whether one of the saves is of a known format, and has more than weights."""
    return any(_is_known(part) and not save.is_alone for save in own for part in save.parts)


def _is_known(path: Path) -> bool:
    try:
        return path.is_dir() and not path.name.endswith(UNFINISHED) and reader_of(path) is not None
    except OSError:
        return False


def _why_not(run: Path, every: Sequence[Save], found: Iterable[Tracker]) -> Iterator[tuple[Save, str]]:
    """Each save, and why it is no candidate beside others; empty if it is one."""
    named = {os.path.realpath(names) for _, names in found if names}
    away = {save.path for save in every if leaves(save.path, run) and os.path.realpath(save.path) not in named}
    has_native = any(save.path.is_dir() and not save.is_universal for save in every if save.path not in away)
    for save in every:
        reason = SKIPPED_UNIVERSAL if save.is_universal and has_native else ""
        reason = SKIPPED_ELSEWHERE if save.path in away else reason
        yield save, reason if len(every) > 1 else ""


def how_to_load(save: Path, checkpoint_format: str) -> str:
    """The option of the framework that loads a save; empty if that depends on the script."""
    if OF_MEGATRON.fullmatch(save.name):
        return f"--load {shlex.quote(str(save.parent))} --ckpt-step {int(save.name.removeprefix('iter_'))}"
    if OF_TRAINER.fullmatch(save.name):
        return f"resume_from_checkpoint={str(save)!r}"
    if is_universal(save):
        return f'tag {save.name} in {save.parent}, with "load_universal": true'
    return f"tag {save.name} in {save.parent}" if checkpoint_format.startswith("deepspeed") else ""


def _unknown(path: Path) -> Path | None:
    """A file in a folder without saves, or in the folders in it, that can be a checkpoint by its name."""
    folders = (path, *(own for own in sorted(path.iterdir()) if own.is_dir()))
    return next((file for own in folders for file in sorted(own.iterdir()) if file.name.endswith(SUFFIXES)), None)


def _reason(report: Report) -> str:
    """The first of the findings that decide, and how many others there are."""
    every = rows(report, notes=False)
    if not every:
        return "no tensor is in it"
    first = every[0]
    place = "" if first.where == str(report.checkpoint.path) else first.where
    text = " ".join(filter(None, (first.kind.name, f"{place}:" if place and first.detail else place, first.detail)))
    return f"{text}, and {len(every) - 1} more" if len(every) > 1 else text
