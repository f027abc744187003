"""A run's folder: its saves, complete or not, and the save that its tracker names.

DeepSpeed writes the name of a folder to `latest` (its converter: to `latest_universal`). Megatron writes an iteration,
which stands for the folder `iter_0000010`, or the word `release` to `latest_checkpointed_iteration.txt`. verl writes
the same file for the folder `global_step_10`, which has a checkpoint for each trained model.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ckpt_patches.formats import dcp
from ckpt_patches.formats.megatron_torch import is_without_distributed_optimizer
from ckpt_patches.formats.reading import HAS_OTHERS_BELOW, reader_of
from ckpt_patches.formats.torch_dist import INDEX
from ckpt_patches.formats.zarr import METADATA

MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"
TRACKERS = ("latest", "latest_universal", MEGATRON_TRACKER)
LONGEST_NAME = 255  # bytes, of a folder's name and of a tracker's content
UNFINISHED = ".unfinished"  # suffix of a folder that a tool of this package has not finished
OF_VERL = re.compile(r"global_step_\d{1,15}")
NAMED = re.compile(r"iter_\d{7,}|global_step\d+\w*")
# Files and folders in saves of the known formats.
PARTS = re.compile(
    r".*\.distcp|metadata\.json|common\.pt|.*_(model|optim)_states\.pt|mp_rank_\d+(_\d+)*|fsdp_config\.json"
)
MOST_ENTRIES = 10_000  # entries of a folder that are checked


class Tracker(NamedTuple):
    """A file that names a checkpoint."""

    path: Path
    names: Path | None  # the folder; None if the file names no folder


def save_of(checkpoint: Path) -> Path:
    """The folder that a run resumes from. verl: the parent folder, which has the checkpoints of all models."""
    return checkpoint.parent if OF_VERL.fullmatch(checkpoint.parent.name) else checkpoint


def saves(path: Path) -> Iterator[Path]:
    """The saves in a folder: itself, those below it, and missing ones that trackers name. Visits each folder once.

    Of the folders outside to which links lead, it visits none below them.
    """
    return _saves(path, path, set())


def leaves(path: Path, folder: Path) -> bool:
    """Whether links in a path lead out of a folder."""
    return not path.resolve().is_relative_to(folder.resolve())


def _saves(path: Path, root: Path, seen: set[tuple[int, int]]) -> Iterator[Path]:
    try:
        stat = path.stat()
        reader = reader_of(path)
        is_save = reader is not None or why_incomplete(path) is not None or is_other_save(path)
        is_last = is_save and reader not in HAS_OTHERS_BELOW
        folders = [] if is_last else sorted(folder for folder in path.iterdir() if folder.is_dir())
    except Exception:  # the audit reports it
        is_save, is_last, folders = True, True, []
    else:
        if (stat.st_dev, stat.st_ino) in seen:
            return
        seen.add((stat.st_dev, stat.st_ino))
    if is_save:
        yield path
    if is_last or leaves(path, root):
        return
    # Symlinks come last, so that each folder is reported under its own name.
    for folder in sorted(folders, key=Path.is_symlink):
        yield from _saves(folder, root, seen)
    yield from sorted(missing for tracker in trackers(path) if (missing := _not_there(tracker)))


def _not_there(tracker: Tracker) -> Path | None:
    """The missing folder that a tracker names; the tracker itself if it names no folder."""
    if tracker.names is None:
        return tracker.path
    return None if tracker.names.is_dir() else tracker.names


def trackers(path: Path) -> list[Tracker]:
    """The trackers in a folder."""
    return [Tracker(path / name, _named_in(path / name)) for name in TRACKERS if (path / name).is_file()]


def _named_in(file: Path) -> Path | None:
    with file.open("rb") as opened:
        text = opened.read(LONGEST_NAME + 2)
    name = text.decode("utf-8", "replace").strip()
    if file.name == MEGATRON_TRACKER and name.isdecimal():
        of_verl = any(OF_VERL.fullmatch(entry.name) for entry in file.parent.iterdir())
        name = f"global_step_{int(name)}" if of_verl else f"iter_{int(name):07d}"
    is_name = name not in ("", ".", "..") and len(text) <= LONGEST_NAME + 1 and name.isprintable() and "/" not in name
    return file.with_name(name) if is_name else None


def why_incomplete(path: Path) -> str | None:
    """The reason why a path that no reader accepts is an unfinished save; None if it is not one."""
    if path.name in TRACKERS and not path.is_dir():
        return "it does not name a folder"
    if not path.exists():
        return "it is not there, and a tracker names it"
    if path.name.endswith(UNFINISHED):
        return "the tool that writes it did not finish"
    names = _names(path)
    if not names:
        return "the folder is empty" if NAMED.fullmatch(path.name) else None
    if is_other_save(path):
        return None
    parts = [name for name in names if PARTS.fullmatch(name) or (path / name / METADATA).exists()]
    if INDEX in names:
        return "metadata.json, which Megatron writes last, is not there"
    return f"only a part of a save is there, such as {parts[0]}" if parts else None


def is_other_save(path: Path) -> bool:
    """Whether a folder that no reader accepts is a save in another format. There are three cases.

    It has the index of torch.distributed.checkpoint, which is written last. Megatron's folders, detected by name, are
    excluded: they have `metadata.json` after it. Or it is Megatron's `torch` format without the distributed optimizer.
    Or it is named like a save, has files, and has no part of a save in a known format.
    """
    names = _names(path)
    if is_without_distributed_optimizer(path):
        return True
    if INDEX in names:
        return dcp.ITERATION.fullmatch(path.name) is None
    is_known = any(PARTS.fullmatch(name) or (path / name / METADATA).exists() for name in names)
    return NAMED.fullmatch(path.name) is not None and not is_known and any((path / n).is_file() for n in names)


def _names(path: Path) -> list[str]:
    return sorted(name for name, _ in zip((entry.name for entry in path.iterdir()), range(MOST_ENTRIES), strict=False))
