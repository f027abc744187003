"""A folder whose writers can be killed: it has another name until it is complete; the same command continues it."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ckpt_patches.errors import UserError
from ckpt_patches.runtime.durable import TEMPORARY, make_folder, replace_durably, sync_folder
from ckpt_patches.runtime.units import in_bytes

SPARE = 64 << 20  # bytes that stay free on the disk
TOGETHER = 8  # folders that are synced at the same time


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


class UnfinishedFolder:
    """An output folder: named `working` while it is written, and `final` in the end.

    `fingerprint` covers everything that the output depends on; the file `mark` holds it until the end. `work` is the
    name of the work in messages.
    """

    def __init__(self, folder: Path, fingerprint: str, mark: str, work: str) -> None:
        self.final = Path(os.path.realpath(folder))
        self.working = self.final.with_name(f"{self.final.name}.unfinished")
        self.fingerprint, self.mark, self.work = fingerprint, mark, work

    def check(self, sizes: Mapping[str, int]) -> None:
        """Check that the missing ones of these files can be written, of which the bytes are given by name.

        Raises:
            UserError: the folder has other content, or the disk has too little room.
        """
        # First look for content, then for the mark: other processes of this work may make it, or rename, at any moment.
        taken, begun = _holds_any(self.final), _holds_any(self.working)
        if not self.is_of_this(self.final):
            if taken:
                raise UserError(f"{self.final} exists; name another output folder, or remove it")
            if begun and not self.is_of_this(self.working) and not self.is_of_this(self.final):
                raise UserError(
                    f"{self.working} holds the unfinished {self.work} of another checkpoint, or of this one before it "
                    "changed; remove it to begin anew"
                )
        check_space(self.final, sum(sizes[name] for name in self.missing(sizes)))

    def begin(self) -> None:
        """Make the folder and mark it as this work's."""
        if not self.is_of_this(self.final) and not self.is_of_this(self.working):
            make_folder(self.working)
            replace_durably(self.working / self.mark, json.dumps({"fingerprint": self.fingerprint}).encode())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder against other writers, if the file system supports locks, and remove incomplete files.

        Raises:
            UserError: another process holds the lock.
        """
        with ExitStack() as stack:
            with suppress(FileNotFoundError):  # it is complete
                file = stack.enter_context(open(self.working / self.mark, "r+b"))
                try:
                    # A lock of the process and not of the open file: workers of a killed process do not hold it.
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except (BlockingIOError, PermissionError):
                    raise UserError(
                        f"another {self.work} writes {self.working} now; wait for it, or name another output folder"
                    ) from None
                except OSError:
                    pass  # the file system has no locks
            for path in self.working.rglob(f"{TEMPORARY}*"):
                if not path.is_dir():  # a folder can have such a name, as one of a parameter
                    path.unlink(missing_ok=True)
            yield

    def missing(self, names: Iterable[str]) -> list[str]:
        """The files that are still to be written. Only a complete file has its final name."""
        folder = self.final if self.is_of_this(self.final) else self.working
        return [name for name in names if not os.path.isfile(f"{folder}/{name}")]

    def finish(self, names: Iterable[str] = ()) -> None:
        """Sync the entries of all folders, in which the files are synced, and give the folder its final name.

        Raises:
            UserError: one of these files is missing.
            OSError: a folder could not be synced.
        """
        if missing := self.missing(names):
            raise UserError(f"{self.working / missing[0]} is missing, and {len(missing) - 1} more")
        with ThreadPoolExecutor(TOGETHER) as pool:  # syncs at the same time share the disk's work
            list(pool.map(sync_folder, (Path(folder) for folder, _, _ in os.walk(self.working))))
        os.rename(self.working, self.final)
        sync_folder(self.final.parent)

    def is_of_this(self, folder: Path) -> bool:
        """Whether a folder's content was written by this work."""
        try:
            found = json.loads((folder / self.mark).read_text())
        except (OSError, ValueError):
            return False
        return bool(found == {"fingerprint": self.fingerprint})


def _holds_any(folder: Path) -> bool:
    """Whether a folder has a file that is not temporary, or is not a folder."""
    try:
        return any(not name.startswith(TEMPORARY) for name in os.listdir(folder))
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        return True


@contextmanager
def reported(path: str | Path) -> Iterator[None]:
    """Convert file system errors to a UserError with the file's final name."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
