"""A lock for one writer at a time in a tree, also across hosts that share it.

On a network file system, a lock on a folder excludes only processes of the same host. The holder therefore also creates
a lock file that names it, atomically (with a hard link or O_EXCL). A lock file of an ended process of this host is
taken over. Only people can know whether a process of another host has ended.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ckpt_patches import tell
from ckpt_patches.errors import UserError
from ckpt_patches.runtime.durable import NO_LINKS, make_folder, sync_folder

NAME = "lock.json"
# Seconds to wait for a process of another host, or for a partly written lock file to be completed.
PATIENCE = 60.0
INTERVAL = 0.05


@dataclass(frozen=True)
class Holder:
    """The process that a lock file names."""

    host: str  # its name, boot id and PID namespace
    process: int
    start: str  # its start time in the kernel's units: process ids are reused

    def __str__(self) -> str:
        return f"process {self.process} of {self.host}"


class NotReleasedError(Exception):
    """The work is done, but the lock file cannot be removed; the next run takes it over."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def held(root: Path, folder: Path) -> Iterator[None]:
    """Hold the lock of a tree; waits for another process.

    Args:
        root: the tree.
        folder: our folder in the tree, for the lock file; created if missing.

    Raises:
        UserError: a process of another host holds the lock. Nothing is changed.
        OSError: the lock file cannot be created.
        NotReleasedError: the lock file cannot be removed at the end.
    """
    descriptor = os.open(root, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # the file system does not support it: the lock file must suffice
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        path = folder / NAME
        _make(path)
        try:
            sync_folder(root)  # a killed process may have made our folder
            for left in folder.glob(f".{NAME}.*"):  # of killed processes
                left.unlink(missing_ok=True)
            yield
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the important one; the next run takes the file over
                path.unlink(missing_ok=True)
            raise
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise NotReleasedError(error) from error
    finally:
        os.close(descriptor)


def _make(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not _made(path):
        holder = _holder(path)
        if holder is not None and holder.host == _host() and not _lives(holder):
            tell(f"took over {path}: {holder}, which made it, has ended")
            path.unlink(missing_ok=True)
        elif time.monotonic() > deadline and (holder is None or holder.host != _host()):
            raise UserError(
                f"expected no lock on this tree, found {path} for {PATIENCE:.0f} s, of "
                f"{holder or 'a process unknown'}; nothing was changed. Wait for that process, or if it has ended, "
                "delete that file"
            )
        else:
            time.sleep(INTERVAL)


def _made(path: Path) -> bool:
    """Create the lock file with its complete content; False if one exists."""
    make_folder(path.parent)
    temporary = path.with_name(f".{NAME}.{os.urandom(4).hex()}")
    try:
        with open(temporary, "x") as file:
            json.dump(asdict(_this_process()), file)
        os.link(temporary, path)
    except (FileExistsError, FileNotFoundError):  # or another process has removed the empty folder
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        return _made_without_links(path)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _made_without_links(path: Path) -> bool:
    """Create the lock file. For a moment it is empty; after a kill just then, only people can know its owner."""
    try:
        with open(path, "x") as file:
            json.dump(asdict(_this_process()), file)
    except FileExistsError:
        return False
    return True


def _holder(path: Path) -> Holder | None:
    """The process that the lock file names; None if the file is incomplete or gone."""
    try:
        return Holder(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _this_process() -> Holder:
    return Holder(_host(), os.getpid(), _start(os.getpid()))


def _host() -> str:
    """This host's name, boot id and PID namespace: process ids are unique only within these."""
    known = [socket.gethostname()]
    with contextlib.suppress(OSError):
        known += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(known)


def _lives(holder: Holder) -> bool:
    return bool(_start(holder.process)) and _start(holder.process) == holder.start


def _start(process: int) -> str:
    """The start time of a process; empty if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
