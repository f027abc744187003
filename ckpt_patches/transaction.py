"""Change several files together: after a crash at any point the next run puts back what was there before.

The new texts and the old ones are written to a journal first. The last file of the list decides: once it holds its new
text the change is complete, before that it never happened.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

JOURNAL = "journal.json"

# What one says that cannot sync a folder, as some network file systems cannot.
_NO_SYNC = {errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


@dataclass(frozen=True)
class Change:
    """A file's text before and after; None: there is no such file."""

    path: Path
    before: bytes | None
    after: bytes | None


def commit(folder: Path, changes: Sequence[Change]) -> None:
    """Make all changes. `folder` (on the same machine, ours alone) holds the journal meanwhile."""
    make_folder(folder)
    entries = []
    for index, change in enumerate(changes):
        if change.before is not None:
            write_durably(folder / f"before.{index}", change.before)
        entries.append({"path": str(change.path), "before": _digest(change.before), "after": _digest(change.after)})
    write_atomically(folder / JOURNAL, json.dumps(entries).encode())
    for change in changes:
        _put(change.path, change.after)
    _finish(folder)


def recover(folder: Path) -> bool:
    """Undo a change that was interrupted; whether there was one."""
    try:
        entries = json.loads((folder / JOURNAL).read_bytes())
    except FileNotFoundError:
        _clean(folder)
        return False
    decisive = entries[-1]
    if _digest(_read(Path(decisive["path"]))) != decisive["after"]:
        for index, entry in enumerate(entries):
            path = Path(entry["path"])
            _temporary(path).unlink(missing_ok=True)
            if _digest(_read(path)) == entry["after"] != entry["before"]:
                _put(path, (folder / f"before.{index}").read_bytes() if entry["before"] else None)
    _finish(folder)
    return True


def _finish(folder: Path) -> None:
    (folder / JOURNAL).unlink()
    sync_folder(folder)
    _clean(folder)


def _clean(folder: Path) -> None:
    """Remove what belongs to no journal."""
    for left in [*folder.glob("before.*"), _temporary(folder / JOURNAL)]:
        left.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that its name never stands for half of it; keeps the mode of the file that it replaces."""
    temporary = _temporary(path)
    write_durably(temporary, data)
    if path.exists():
        shutil.copymode(path, temporary)
    os.replace(temporary, path)
    sync_folder(path.parent)


def write_durably(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it.

    Raises:
        OSError: it names the file.
    """
    try:
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _put(path: Path, data: bytes | None) -> None:
    if data is None:
        path.unlink(missing_ok=True)
        return
    make_folder(path.parent)
    write_atomically(path, data)


def _temporary(path: Path) -> Path:
    """Beside the file, because a rename is atomic only within a file system; one writer at a time holds the lock."""
    return path.with_name(f".{path.name}.ckpt-patches")


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _digest(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing; wait until the disk has their names."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)  # another process may be as far
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder; where the file system cannot tell, do not wait.

    Raises:
        OSError: an error of the disk, or there is no such folder. It names the folder.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a folder that may be written and not read cannot be opened for it
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            error.filename = str(folder)
            raise
    finally:
        os.close(descriptor)
