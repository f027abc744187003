"""A folder whose writers can be killed: it has another name until it is complete; the same command continues it."""

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt_patches.errors import UserError
from ckpt_patches.runtime.durable import TEMPORARY, make_folder, replace_durably, sync_folder
from ckpt_patches.runtime.units import in_bytes

SPARE = 64 << 20  # bytes that stay free on the disk
TOGETHER = 8  # folders that are synced at the same time
LOCK = ".ckpt-patches.lock"  # a file in an unfinished folder


def check_space(output: Path, needed: int) -> int:
    """Check that the disk has room for so many bytes of output; return the free bytes.

    Raises:
        UserError: it has too little.
    """
    existing = next(path for path in (output, *Path(os.path.abspath(output)).parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed + SPARE:
        raise UserError(f"{output} needs {in_bytes(needed)}, and {existing} has {in_bytes(free)} free")
    return free


def check_outside(source: Path, output: Path) -> None:
    """Check that an output is not written into its source.

    Raises:
        UserError: it is the source, or is inside it.
    """
    inner, outer = Path(os.path.realpath(output)), Path(os.path.realpath(source))
    if inner == outer or outer in inner.parents:
        raise UserError(f"{output}: expected an output folder outside of {source}, which is only read")


def check_parent(output: Path) -> None:
    """Check that the folder around an output is there, so that a mistyped path makes none.

    Raises:
        UserError: it is not.
    """
    parent = Path(os.path.abspath(output)).parent
    if not parent.is_dir():
        raise UserError(f"{output}: expected a folder {parent}, found none: make it first, or correct the path")


HELD: dict[Path, object] = {}  # the folders that this process writes: its own locks do not exclude each other


class UnfinishedFolder:
    """An output folder: named `final` in the end, and `working` while it is written.

    The latter name has a digest of `depends_on`, everything that the output depends on: only the same work finds it
    again. `work` is the name of the work in messages, `sources` are what it reads.
    """

    def __init__(self, folder: Path, work: str, depends_on: str, *sources: Path) -> None:
        self.final, self.work, self.depends_on = Path(os.path.realpath(folder)), work, depends_on
        digest = hashlib.sha256(f"{work} {depends_on}".encode()).hexdigest()[:12]
        self.working = self.final.with_name(f"{self.final.name}-{digest}.unfinished")
        read = [Path(os.path.realpath(source)) for source in sources]
        self.kept = {folder for source in read for folder in (source, *source.parents)}

    def check(self, sizes: Mapping[str, int]) -> None:
        """Check that these files can be written, of which the bytes are given by name.

        Raises:
            UserError: something has the final name, or the disk has too little room for what is missing.
        """
        self._check_final()
        check_space(self.final, sum(sizes[own] for own in self.missing(sizes)))

    def _check_final(self) -> None:
        if self.final.exists() and not (self.final.is_dir() and not os.listdir(self.final)):
            self._remove_abandoned(self.working)  # a process that was killed, or came late, can have left it
            with suppress(OSError):
                os.rmdir(self.working)  # without the lock file, which went before it
            raise UserError(f"{self.final} exists; name another output folder, or remove it")

    def _remove_abandoned(self, folder: Path) -> None:
        """Remove an unfinished folder that no process writes, unless a source is in it."""
        if folder in HELD or folder in self.kept:
            return
        with suppress(OSError), open(folder / LOCK, "r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder, lock it against other writers if the file system has locks, and remove incomplete files.

        Removes what killed processes have left of other work for the same output.

        Raises:
            UserError: another writer holds the lock, or has completed the output.
        """
        busy = UserError(f"another {self.work} writes {self.working} now; wait for it, or name another output folder")
        token = object()
        if HELD.setdefault(self.working, token) is not token:
            raise busy
        try:
            make_folder(self.working)
            with open(self.working / LOCK, "ab") as file:
                try:
                    # A lock of the process and not of the open file: workers of a killed process do not hold it.
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except (BlockingIOError, PermissionError):
                    raise busy from None
                except OSError:
                    pass  # the file system has no locks
                try:
                    self._check_final()
                except UserError:
                    self.discard()
                    raise
                self._tidy()
                yield
        finally:
            del HELD[self.working]

    def discard(self) -> None:
        """Remove the folder, which this process holds, if it is there."""
        with suppress(OSError):
            _remove(self.working)

    def _tidy(self) -> None:
        """Remove incomplete files, and what is left of other work."""
        for path in self.working.rglob(f"{TEMPORARY}*"):
            if not path.is_dir():  # a folder can have such a name, as one of a parameter
                path.unlink(missing_ok=True)
        name = re.compile(rf"{re.escape(self.final.name)}-[0-9a-f]{{12}}\.unfinished")
        for other in filter(name.fullmatch, os.listdir(self.final.parent)):
            self._remove_abandoned(self.final.with_name(other))

    def missing(self, names: Iterable[str]) -> list[str]:
        """The files that are still to be written. Only a complete file has its final name."""
        return [name for name in names if not os.path.isfile(f"{self.working}/{name}")]

    def finish(self, names: Iterable[str], tracker: str = "") -> None:
        """Sync the entries of all folders, in which the files are synced, and give the folder its final name.

        `tracker` is a file beside it to write that name into. It comes first: until the rename, it names no folder.

        Raises:
            UserError: one of these files is missing, or other work has completed the output.
            OSError: a folder could not be synced.
        """
        if missing := self.missing(names):
            raise UserError(f"{self.working / missing[0]} is missing, and {len(missing) - 1} more")
        with ThreadPoolExecutor(TOGETHER) as pool:  # syncs at the same time share the disk's work
            list(pool.map(sync_folder, (Path(folder) for folder, _, _ in os.walk(self.working))))
        self._check_final()
        if tracker:
            replace_durably(self.final.parent / tracker, self.final.name.encode())
        os.rename(self.working, self.final)
        (self.final / LOCK).unlink(missing_ok=True)
        sync_folder(self.final.parent)


def _remove(folder: Path) -> None:
    """Remove an unfinished folder, its lock file last: nothing else tells that a folder is abandoned."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif entry.name != LOCK:
            os.unlink(entry.path)
    shutil.rmtree(folder)
