"""A run's folder: its saves, complete or not, and the folders that are resumed from as one."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ckpt_patches.formats import damages, dcp, files_reader, megatron_arrays
from ckpt_patches.formats.checkpoint import Checkpoint
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.megatron_torch import RANK, is_without_distributed_optimizer
from ckpt_patches.formats.reading import HAS_OTHERS_BELOW, reader_of
from ckpt_patches.formats.torch_dist import INDEX
from ckpt_patches.formats.trackers import OF_VERL, TRACKERS, Tracker, trackers
from ckpt_patches.formats.universal import FOLDER as UNIVERSAL
from ckpt_patches.formats.universal import is_universal
from ckpt_patches.formats.zarr import METADATA

UNFINISHED = ".unfinished"  # suffix of a folder that a tool of this package has not finished
# Folders that are resumed from as one, and can hold several checkpoints: verl's, those of Transformers' Trainer and of
# Accelerate, and Lightning's.
UNIT = re.compile(rf"{OF_VERL.pattern}|checkpoint[-_]\d{{1,15}}|.+\.ckpt")
NAMED = re.compile(r"iter_\d{7,}|global_step\d+\w*")
# Files and folders in saves of the known formats. In a folder above saves, only those of `DATA` make it a save, too.
DATA = re.compile(rf".*\.distcp|.*_(model|optim)_states\.pt|{RANK.pattern}")
PARTS = re.compile(rf"{DATA.pattern}|metadata\.json|common\.pt|fsdp_config\.json")
LOADER = re.compile(r"train_dataloader_dprank\d+\.pt")  # Megatron's and its Bridge's position in the training data
MOST_ENTRIES = 10_000  # entries of a folder that are checked


def unit_of(checkpoint: Path, root: Path) -> Path:
    """The folder that a run resumes from: the checkpoint, or the unit around it, up to the audited folder."""
    around = [checkpoint, *(folder for folder in checkpoint.parents if folder == root or root in folder.parents)]
    return next(filter(_is_unit, around), checkpoint)


def runs(folder: Path) -> dict[Path, dict[Path, list[Path]]]:
    """By the folder of each run, its units by number, each with the saves in it."""
    found: dict[Path, dict[Path, list[Path]]] = {}
    for save in saves(folder):
        unit = unit_of(save, folder)
        found.setdefault(unit.parent, {}).setdefault(unit, []).append(save)
    return found


def _is_unit(folder: Path) -> bool:
    """Whether a folder has the name of a unit, and is not a run that has this name: that has several saves."""
    if not UNIT.fullmatch(os.path.basename(os.path.abspath(folder))) or not folder.is_dir():
        return False
    return sum(NAMED.fullmatch(name) is not None for name in _names(folder)) < 2


def saves(path: Path) -> list[Path]:
    """The saves in a folder: itself, those below it, and missing ones that trackers name. Visits each folder once.

    Links come last, so that each folder is reported under its own name. Of the folders outside to which they lead,
    none below is visited.
    """
    visits: list[_Visit] = []
    seen: set[tuple[int, int]] = set()
    folders, links = [path], list[Path]()
    while folders or links:
        visit = _visit(folders.pop() if folders else links.pop(0), path, seen)
        visits.append(visit)
        for folder in visit.folders:
            (links if folder.is_symlink() else folders).append(folder)
    found: list[Path] = []
    above: set[Path] = set()  # the saves
    for visit in reversed(visits):  # what is below a folder was visited after it
        own = [visit.path] if visit.is_save and (visit.has_data or visit.path not in above) else []
        own += visit.named
        found += own
        above.update(*(one.parents for one in own))
    return sorted(found, key=_by_number)


class _Visit(NamedTuple):
    """What is in a folder."""

    path: Path
    is_save: bool = False
    has_data: bool = False  # of a save; without any it is none if there are saves below it
    folders: Sequence[Path] = ()  # those that can be saves
    named: Sequence[Path] = ()  # by trackers, and missing


def _visit(path: Path, root: Path, seen: set[tuple[int, int]]) -> _Visit:
    try:
        stat = path.stat()
        if (stat.st_dev, stat.st_ino) in seen:
            return _Visit(path)
        seen.add((stat.st_dev, stat.st_ino))
        reader = reader_of(path)
        is_save = reader is not None or why_not_read(path) is not None
        has_data = is_save and _has_data(path, reader)
        if path.name.endswith(UNFINISHED):  # what is in it can be whole, and not yet on the disk
            return _Visit(path, is_save=True, has_data=True)
        if leaves(path, root):
            return _Visit(path, is_save, has_data)
        named = [missing for tracker in trackers(path) if (missing := _not_there(tracker))]
        return _Visit(path, is_save, has_data, sorted(_folders_below(path)), named)
    except Exception:  # the audit reports it
        return _Visit(path, is_save=True, has_data=True)


def _folders_below(path: Path) -> Iterator[Path]:
    """The folders in a folder that can be saves: those that are no part of it."""
    parts = {*dcp.folders(path)} - {path}
    is_universal_one, is_local = is_universal(path), files_reader.is_local(path)
    for folder in path.iterdir():
        is_part = folder in parts or RANK.fullmatch(folder.name) or (folder / METADATA).exists()
        is_part = is_part or (is_universal_one and folder.name == UNIVERSAL) or (is_local and folder.name.isdecimal())
        if folder.is_dir() and not is_part:
            yield folder


def _has_data(path: Path, reader: Callable[[Path], Checkpoint] | None) -> bool:
    """Whether a save has more than a file that can be a stray one, such as `metadata.json` or `.metadata`."""
    if reader in (*HAS_OTHERS_BELOW, files_reader.read_local) or is_universal(path) or NAMED.fullmatch(path.name):
        return True
    return bool({*dcp.folders(path)} - {path}) or any(map(DATA.fullmatch, _names(path)))


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Sort key: `global_step10` comes after `global_step9`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18}|/)", str(path))]


def leaves(path: Path, folder: Path) -> bool:
    """Whether links in a path lead out of a folder."""
    return not path.resolve().is_relative_to(folder.resolve())


def _not_there(tracker: Tracker) -> Path | None:
    """The missing folder that a tracker names; the tracker itself if it names no folder."""
    if tracker.names is None:
        return tracker.path
    return None if tracker.names.is_dir() else tracker.names


def why_not_read(path: Path) -> Finding | None:
    """The finding on a path that no reader accepts and that is a save: unfinished, or in another format.

    Another format has the index of torch.distributed.checkpoint, which is written last (Megatron's folders, by their
    name, have `metadata.json` after it), or is Megatron's `torch` format without the distributed optimizer, or is named
    like a save, has files, and has no part of a save in a known format.
    """
    why = ""
    if path.name in TRACKERS and not path.is_dir():
        why = "it does not name a folder"
    elif not path.exists():
        why = "it is not there, and a tracker names it"
    elif path.name.endswith(UNFINISHED):
        why = "the tool that writes it did not finish"
    elif not (names := _names(path)):
        why = "the folder is empty" if NAMED.fullmatch(path.name) else ""
    else:
        parts = [name for name in names if PARTS.fullmatch(name) or (path / name / METADATA).exists()]
        is_named, has_index = NAMED.fullmatch(path.name) and not parts, INDEX in names
        is_other = is_named and any(_is_file_of_save(path / name) for name in names)
        if is_without_distributed_optimizer(path) or (
            megatron_arrays.ITERATION.fullmatch(path.name) is None if has_index else is_other
        ):
            return Finding(damages.NOT_READ, str(path), detail="its files are of no format that is known here")
        if has_index:
            why = "metadata.json, which Megatron writes last, is not there"
        elif parts:
            why = f"only a part of a save is there, such as {parts[0]}"
    return Finding(damages.INCOMPLETE_SAVE, str(path), detail=why) if why else None


def _is_file_of_save(path: Path) -> bool:
    return path.is_file() and not LOADER.fullmatch(path.name)


def _names(path: Path) -> list[str]:
    return sorted(name for name, _ in zip((entry.name for entry in path.iterdir()), range(MOST_ENTRIES), strict=False))
