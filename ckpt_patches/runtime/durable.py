"""Writes that are on disk when they return, including entries of folders."""

import contextlib
import errno
import os
import stat
from pathlib import Path

# Errors of a file system that cannot sync a folder, such as some network file systems.
_NO_SYNC = {errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


def write_durably(path: Path, data: bytes, like: Path | None = None) -> None:
    """Write and sync a file; with `like`, it gets that file's mode, and if permitted its owner.

    Raises:
        OSError: the error names the file.
    """
    try:
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            if like is not None:
                _take_owner_and_mode(file.fileno(), like)
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def replace_durably(path: Path, data: bytes, temporary: Path | None = None) -> None:
    """Write and sync a file under a temporary name, then rename it; an existing file stays until then.

    Raises:
        OSError: the error names the file or its folder; no temporary file is left.
    """
    temporary = temporary or path.with_name(f".{path.name[:100]}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        write_durably(temporary, data)
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _take_owner_and_mode(descriptor: int, like: Path) -> None:
    wanted, found = like.stat(), os.fstat(descriptor)
    if (wanted.st_uid, wanted.st_gid) != (found.st_uid, found.st_gid):
        with contextlib.suppress(PermissionError):  # only root may; else the current user owns the new file
            os.fchown(descriptor, wanted.st_uid, wanted.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(wanted.st_mode))


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
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)
