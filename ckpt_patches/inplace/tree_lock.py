"""One writer at a time in a tree, also from several hosts that share it.

A lock on a folder excludes the processes of one host alone where the file system is a network's. So there is a file as
well, which one process makes (a link to one of its own, or O_EXCL) and which names it. A file of a process of this host
that has ended is taken over; whether one of another host has ended, only people can know.
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
BREAK = "--break-lock"
# Seconds that a process of another host has for its change, and the half-written file of one for the rest of it.
PATIENCE = 60.0
INTERVAL = 0.05


@dataclass(frozen=True)
class Holder:
    """The process that a lock file names."""

    host: str  # with what tells containers of a host apart
    process: int
    start: str  # when that began, as the kernel counts: a number may be given again

    def __str__(self) -> str:
        return f"process {self.process} of {self.host}"


class NotReleasedError(Exception):
    """The work is done, and the lock's file cannot be removed; the next run takes it over."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def held(root: Path, folder: Path, *, break_lock: bool = False) -> Iterator[None]:
    """Hold the lock of a tree; waits for another process.

    Args:
        root: the tree.
        folder: our own in it, made where it is missing; the file is there.
        break_lock: remove the file of whoever holds the lock.

    Raises:
        UserError: a process of another host holds it. Nothing is changed.
        OSError: the file cannot be made.
        NotReleasedError: it cannot be removed at the end.
    """
    descriptor = os.open(root, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without it: the file has to do
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        path = folder / NAME
        if break_lock:
            path.unlink(missing_ok=True)
        _make(path)
        try:
            sync_folder(root)  # a process that was killed may have made our folder
            for left in folder.glob(f".{NAME}.*"):  # of others, that were killed
                left.unlink(missing_ok=True)
            yield
        except BaseException:
            with contextlib.suppress(OSError):  # what has gone wrong before says more, and the next run takes it over
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
                f"{holder or 'a process unknown'}; nothing was changed. Wait for that process, or if it has ended: "
                f"{BREAK}"
            )
        else:
            time.sleep(INTERVAL)


def _made(path: Path) -> bool:
    """Make the file with all that it says; False if there is one."""
    make_folder(path.parent)
    temporary = path.with_name(f".{NAME}.{os.urandom(4).hex()}")
    try:
        with open(temporary, "x") as file:
            json.dump(asdict(_this_process()), file)
        os.link(temporary, path)
    except (FileExistsError, FileNotFoundError):  # or another process has removed the folder, which was empty
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        return _made_without_links(path)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _made_without_links(path: Path) -> bool:
    """For a moment it says nothing; after a kill just then only people can tell whose it is."""
    try:
        with open(path, "x") as file:
            json.dump(asdict(_this_process()), file)
    except FileExistsError:
        return False
    return True


def _holder(path: Path) -> Holder | None:
    """Who has made the file; None if it says nothing yet, or is gone."""
    try:
        return Holder(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _this_process() -> Holder:
    return Holder(_host(), os.getpid(), _start(os.getpid()))


def _host() -> str:
    """This host's name, and what tells it from others of that name: numbers of processes are its own."""
    known = [socket.gethostname()]
    with contextlib.suppress(OSError):
        known += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(known)


def _lives(holder: Holder) -> bool:
    return bool(_start(holder.process)) and _start(holder.process) == holder.start


def _start(process: int) -> str:
    """When a process began; empty if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
