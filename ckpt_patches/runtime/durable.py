"""Writes that are on the disk when they return, names of folders included."""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What a file system says that has no hard links, or not this one.
NO_LINKS = {
    *(errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV),
}
# What one says that cannot sync a folder, as some network file systems cannot.
_NO_SYNC = {errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


def write_durably(path: Path, data: bytes, like: Path | None = None) -> None:
    """Write a file and wait until the disk has it; with the mode, and where that is allowed the owner, of another file.

    Raises:
        OSError: it names the file.
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


def replace_durably(path: Path, data: bytes) -> None:
    """Write a file that has its name when all of it is on the disk; one that was there stays until then.

    Raises:
        OSError: it names the file that was written, or its folder; nothing else of it is left.
    """
    temporary = path.with_name(f".{path.name[:100]}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        write_durably(temporary, data)
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _take_owner_and_mode(descriptor: int, like: Path) -> None:
    wanted, found = like.stat(), os.fstat(descriptor)
    if (wanted.st_uid, wanted.st_gid) != (found.st_uid, found.st_gid):
        with contextlib.suppress(PermissionError):  # root's alone; another user's file becomes his who replaces it
            os.fchown(descriptor, wanted.st_uid, wanted.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(wanted.st_mode))


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


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A folder of a temporary name beside `output`, which gets that name when all that is in it is on the disk.

    Where the block raises, the folder is removed.

    Raises:
        OSError: the folder cannot be made, or `output` exists and is no empty folder.
    """
    make_folder(output.parent)
    # Not the number of this process alone: one in another container has the same.
    temporary = output.with_name(f".{output.name}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        yield temporary
        for folder, _, files in os.walk(temporary):
            for name in files:
                _sync_file(Path(folder, name))
            sync_folder(Path(folder))
        os.replace(temporary, output)
        sync_folder(output.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
