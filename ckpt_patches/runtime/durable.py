"""Writes that are on disk when they return, including entries of folders."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

TEMPORARY = ".unfinished-"  # the prefix of names of incomplete files
# Errors of a file system that cannot sync a folder, such as some network file systems.
_NO_SYNC = {errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


def write_durably(path: Path, data: bytes, like: Path | None = None) -> None:
    """Write and sync a file; with `like`, it gets that file's mode, and if permitted its owner.

    Raises:
        OSError: the error names the file.
    """
    with _named(path), open(path, "wb") as file:
        file.write(data)
        file.flush()
        if like is not None:
            wanted = like.stat()
            with contextlib.suppress(PermissionError):  # only root may; else the current user owns the new file
                os.fchown(file.fileno(), wanted.st_uid, wanted.st_gid)
            os.fchmod(file.fileno(), stat.S_IMODE(wanted.st_mode))
        os.fsync(file.fileno())


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which is synced and gets its name when the block ends without an error.

    Raises:
        OSError: the error names the file; no temporary file is left.
    """
    # Random and not the process id: processes of two containers can have the same id.
    temporary = path.with_name(f"{TEMPORARY}{os.urandom(4).hex()}-{path.name[:50]}")
    with _named(path):
        try:
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                leave_cache(file)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def leave_cache(file: BinaryIO) -> None:
    """Have the disk begin with a file's data, and leave the page cache to others; a file system may not know this."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def replace_durably(path: Path, data: bytes) -> None:
    """Write and sync a file under a temporary name, then rename it; an existing file stays until then.

    Raises:
        OSError: the error names the file or its folder; no temporary file is left.
    """
    with new_file(path) as file:
        file.write(data)
    sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and sync their entries."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)  # another process may have made it
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder, if the file system supports it.

    Raises:
        OSError: an error of the disk, or the folder does not exist. The error names the folder.
    """
    try:
        _sync(folder)
    except PermissionError:  # a folder that is writable but not readable cannot be opened
        return
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def sync_all(folder: Path) -> None:
    """Sync all files and folders below a folder, and itself."""
    for inner, _, files in os.walk(folder):
        for name in files:
            _sync(Path(inner, name))
        sync_folder(Path(inner))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with _named(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file in errors of one that is open, which have no name."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
