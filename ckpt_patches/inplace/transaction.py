"""Change several files atomically: all of them, or none.

The steps that need disk space come first: a journal, a second name for every file to replace (a hard link; a copy if
the file system has no links), and the new texts under temporary names, each synced. Then the files change by renames
alone, and so does a rollback: neither needs space. The last file of the list commits the change. Before it has its new
text, the change is rolled back: at once after an error, by the next run after a crash. Afterwards only cleanup is left.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ckpt_patches.errors import UserError
from ckpt_patches.runtime.durable import NO_LINKS, make_folder, sync_folder, write_durably

JOURNAL = "journal.json"
JOURNAL_VERSION = 3
WITHOUT_TOKEN = 2  # of 0.2.0: all changes used the same temporary names


@dataclass(frozen=True)
class Change:
    """A file's text before and after; None: the file does not exist."""

    path: Path
    before: bytes | None
    after: bytes | None
    link: str | None = None  # create this symbolic link, whose target has the text `after`, and not a file
    like: Path | None = None  # a new file gets this one's owner and mode


class Standing(Enum):
    """The state of the files after a failed change."""

    NOTHING = "no file is changed"
    ALL = "every file is changed"
    UNFINISHED = "some files may be changed; the next run undoes it"


class Failed(Exception):
    """A file system error stopped a change; `error` is the cause."""

    def __init__(self, error: OSError, standing: Standing, tidy: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.standing = standing
        self.tidy = tidy  # no file of ours is left for the next run to remove


@dataclass(frozen=True)
class _Step:
    """A change as the journal records it, with digests in place of texts."""

    path: Path
    before: str | None
    after: str | None
    temporary: Path  # the new file, until its rename
    kept: Path  # a second name of the old file


def commit(root: Path, folder: Path, changes: Sequence[Change]) -> None:
    """Make all changes to files in the tree `root`. The last one must not be empty, because it commits the others.

    `folder`, in the tree and only ours, holds the journal meanwhile.

    Raises:
        Failed: a file system error. `standing` is whether all files are changed, none, or an unknown part.
    """
    changes = [change for change in changes if change.before != change.after]
    token = os.urandom(4).hex()
    steps = [_step(change.path, _digest(change.before), _digest(change.after), token) for change in changes]
    try:
        make_folder(folder)
        _write_atomically(folder / JOURNAL, _journal(root, steps, token))
        _prepare(changes, steps)
        _switch(steps)
    except OSError as error:
        if not _undone(root, folder, steps, error):
            return
        raise Failed(error, Standing.NOTHING, tidy=True) from error
    except BaseException:  # such as a keyboard interrupt
        with contextlib.suppress(OSError):  # the next run tries again
            recover(root, folder)
        raise
    try:
        _finish(folder, steps)
    except OSError as error:
        raise Failed(error, Standing.ALL, tidy=False) from error


def is_interrupted(folder: Path) -> bool:
    """Whether there is an unfinished change."""
    return (folder / JOURNAL).exists()


def recover(root: Path, folder: Path) -> bool:
    """Roll back an interrupted change, or clean up if it was committed; return whether it was. Needs no space.

    Raises:
        UserError: the journal is damaged, or of a later version.
        OSError: the change stays interrupted.
    """
    steps = _read_journal(root, folder)
    if steps is None:
        _clean(folder)
        return False
    made = _has(steps[-1].path, steps[-1].after)
    if not made:
        _undo(steps)
    _finish(folder, steps)
    return made


def _undone(root: Path, folder: Path, steps: Sequence[_Step], error: OSError) -> bool:
    """Undo after an error; False if the change is nevertheless complete on disk."""
    try:
        return not recover(root, folder)
    except OSError as second:
        raise Failed(error, _standing(steps), tidy=False) from second


def _standing(steps: Sequence[_Step]) -> Standing:
    try:
        if all(_has(step.path, step.before) for step in steps):
            return Standing.NOTHING
    except OSError:
        pass
    return Standing.UNFINISHED


# Steps that need disk space


def _prepare(changes: Sequence[Change], steps: Sequence[_Step]) -> None:
    for change, step in zip(changes, steps, strict=True):
        if change.before is not None:
            _keep(change.path, step.kept)
        if change.after is not None:
            make_folder(change.path.parent)
            _write_new(change, change.after, step.temporary)
    _sync_folders(change.path.parent for change in changes)


def _keep(path: Path, kept: Path) -> None:
    """Give a file a second name, or copy it."""
    try:
        os.link(path, kept, follow_symlinks=False)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        _copy(path, kept)


def _copy(path: Path, to: Path) -> None:
    """Copy a file or link. A partial copy does no harm: no file is replaced before all copies are complete."""
    if path.is_symlink():
        os.symlink(os.readlink(path), to)
    else:
        write_durably(to, path.read_bytes(), like=path)


def _write_new(change: Change, text: bytes, temporary: Path) -> None:
    if change.link is not None:
        os.symlink(change.link, temporary)
    else:
        write_durably(temporary, text, like=change.like if change.before is None else change.path)


# Steps that need none


def _switch(steps: Sequence[_Step]) -> None:
    """Give every file its new text. The others are synced before the last one, which commits."""
    *others, decisive = steps
    for step in others:
        _switch_one(step)
    _sync_folders(step.path.parent for step in others)
    _switch_one(decisive)


def _switch_one(step: _Step) -> None:
    if step.after is None:
        os.unlink(step.path)
    else:
        os.replace(step.temporary, step.path)


def _undo(steps: Sequence[_Step]) -> None:
    """Restore every file that has its new text. A file with another text was changed by others, and stays."""
    for step in steps:
        if step.before == step.after or not _has(step.path, step.after):
            continue
        if step.before is None:
            os.unlink(step.path)
        else:
            os.replace(step.kept, step.path)


def _finish(folder: Path, steps: Sequence[_Step]) -> None:
    """Remove the change's temporary files and second names; when all is synced, the journal."""
    for step in steps:
        _remove(step.temporary)
        _remove(step.kept)
    _sync_folders(step.path.parent for step in steps)
    (folder / JOURNAL).unlink()
    _clean(folder)
    sync_folder(folder)


def _clean(folder: Path) -> None:
    """Remove temporary journal files."""
    for temporary in folder.glob(f".{JOURNAL}.*ckpt-patches"):
        _remove(temporary)


# The journal


def _step(path: Path, before: str | None, after: str | None, token: str) -> _Step:
    return _Step(path, before, after, _temporary(path, token), _temporary(path, token, "-before"))


def _journal(root: Path, steps: Sequence[_Step], token: str) -> bytes:
    """The journal's text. Paths are relative: a tree can be moved, or be elsewhere in the next container."""
    entries = [
        {"path": step.path.relative_to(root).as_posix(), "before": step.before, "after": step.after} for step in steps
    ]
    return json.dumps({"version": JOURNAL_VERSION, "token": token, "entries": entries}).encode()


def _read_journal(root: Path, folder: Path) -> list[_Step] | None:
    path = folder / JOURNAL
    try:
        data = json.loads(path.read_bytes())
        steps = _steps(root, data)
        if not steps:
            raise ValueError("no entries")
        return steps
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"expected a journal of version {JOURNAL_VERSION} in {path}, found {error!r}; this run changed nothing"
        ) from error


def _steps(root: Path, data: Any) -> list[_Step]:
    if data["version"] not in (JOURNAL_VERSION, WITHOUT_TOKEN):
        raise ValueError(f"version {data['version']}")
    token = "" if data["version"] == WITHOUT_TOKEN else bytes.fromhex(data["token"]).hex()
    return [_step(root / in_tree(entry["path"]), entry["before"], entry["after"], token) for entry in data["entries"]]


def in_tree(path: str) -> str:
    """Check a path from a file of ours, which may come from someone else with the tree, and return it.

    Raises:
        ValueError: it is not the path of a file in the tree.
    """
    if not path or Path(path).is_absolute() or ".." in Path(path).parts:
        raise ValueError(f"{path!r} where a path in the tree should be")
    return path


# Files and folders


def _write_atomically(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, then rename it."""
    temporary = _temporary(path, os.urandom(4).hex())
    write_durably(temporary, data)
    os.replace(temporary, path)
    sync_folder(path.parent)


def _remove(path: Path) -> None:
    """Remove a file or link, if it exists; also a broken link."""
    if os.path.lexists(path):
        os.unlink(path)


def _sync_folders(folders: Iterable[Path]) -> None:
    """Sync each folder once, if it exists."""
    for folder in dict.fromkeys(folders):
        if folder.is_dir():
            sync_folder(folder)


def _temporary(path: Path, token: str, end: str = "") -> Path:
    """A name beside the file, unique to one change: a rename is atomic only within a file system."""
    return path.with_name(f".{path.name}.{token}{'.' if token else ''}ckpt-patches{end}")


def _has(path: Path, digest: str | None) -> bool:
    """Whether a file has the text of this digest; with None: whether it does not exist."""
    try:
        return _digest(path.read_bytes()) == digest
    except FileNotFoundError:
        return digest is None


def _digest(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()
