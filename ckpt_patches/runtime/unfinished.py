"""A folder that is written by processes that can be killed: until it is complete it has another name, and the same
command takes it up again.
"""

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

from ckpt_patches.errors import UserError
from ckpt_patches.runtime.durable import make_folder, sync_folder, write_durably
from ckpt_patches.runtime.units import in_bytes

TEMPORARY = ".unfinished-"  # what names of files begin with that are not whole yet
SPARE = 64 << 20  # bytes that stay free on the disk
TOGETHER = 8  # folders that are waited for at once


class File(Protocol):
    """One of those that are to be written."""

    @property
    def name(self) -> str: ...  # below the folder

    @property
    def nbytes(self) -> int: ...


Output = TypeVar("Output", bound=File)


def check_space(output: Path, needed: int) -> int:
    """That an output of so many bytes has room; how many are free.

    Raises:
        UserError: it has none.
    """
    existing = next(path for path in (output, *Path(os.path.abspath(output)).parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed + SPARE:
        raise UserError(f"{output} needs {in_bytes(needed)}, and {existing} has {in_bytes(free)} free")
    return free


def check_outside(source: Path, output: Path) -> None:
    """That an output is not written into what it is made from.

    Raises:
        UserError: it is the source, or lies in it.
    """
    inner, outer = Path(os.path.realpath(output)), Path(os.path.realpath(source))
    if inner == outer or outer in inner.parents:
        raise UserError(f"{output}: expected an output folder outside of {source}, which is only read")


class UnfinishedFolder:
    """`working` while it is written, `final` in the end.

    `fingerprint` is of all that the output depends on, and stands in a file of the name `mark` until the end; `work` is
    what people call this work.
    """

    def __init__(self, folder: Path, fingerprint: str, mark: str, work: str) -> None:
        self.final = Path(os.path.realpath(folder))
        self.working = self.final.with_name(f"{self.final.name}.unfinished")
        self.fingerprint, self.mark, self.work = fingerprint, mark, work

    def check(self, outputs: Iterable[File]) -> None:
        """Check that these files can be written, or the rest of them.

        Raises:
            UserError: something else is there, or the disk has no room.
        """
        self._check_names()
        check_space(self.final, sum(output.nbytes for output in self.missing(outputs)))

    def _check_names(self) -> None:
        # What is there is seen before whose it is: others of this work may make the mark, or rename, at any moment.
        taken, begun = _holds_any(self.final), _holds_any(self.working)
        if self.is_of_this(self.final):
            return
        if taken:
            raise UserError(f"{self.final} exists; name another output folder, or remove it")
        if begun and not self.is_of_this(self.working) and not self.is_of_this(self.final):
            raise UserError(
                f"{self.working} holds the unfinished {self.work} of another checkpoint, or of this one before it "
                "changed; remove it to begin anew"
            )

    def begin(self) -> None:
        """Make the folder; what it holds belongs to this work from now on."""
        if not self.is_of_this(self.final) and not self.is_of_this(self.working):
            make_folder(self.working)
            write_at_once(self.working / self.mark, json.dumps({"fingerprint": self.fingerprint}).encode())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else writes this folder meanwhile, where locks reach; a file system without them grants all.

        Raises:
            UserError: another process does.
        """
        with ExitStack() as stack:
            with suppress(FileNotFoundError):  # it is complete
                file = stack.enter_context(open(self.working / self.mark, "r+b"))
                # A lock of the process and not of the open file: workers of one that was killed do not hold it.
                _lock(file.fileno(), self.working, self.work)
            yield

    def missing(self, outputs: Iterable[Output]) -> list[Output]:
        """What is still to be written. A file has its own name only when it is whole."""
        folder = self.folder
        return [output for output in outputs if not os.path.isfile(f"{folder}/{output.name}")]

    @property
    def folder(self) -> Path:
        """Where the files are now."""
        return self.final if self.is_of_this(self.final) else self.working

    def clean(self) -> list[str]:
        """Remove what an interrupted run left in the middle of a file; all folders that there are."""
        folders = []
        for folder, _, names in os.walk(self.working):
            folders.append(folder)
            for name in names:
                if name.startswith(TEMPORARY):
                    Path(folder, name).unlink(missing_ok=True)
        return folders

    def check_complete(self, outputs: Iterable[File]) -> None:
        """That no file is missing.

        Raises:
            UserError: one is.
        """
        missing = self.missing(outputs)
        if missing:
            raise UserError(f"{self.working / missing[0].name} is missing, and {len(missing) - 1} more")

    def rename(self, folders: Sequence[str], *, sync: bool = True) -> None:
        """Give the complete folder its name, when the disk has the names in these folders."""
        if sync:
            _sync_folders(folders)
        os.rename(self.working, self.final)

    def is_of_this(self, folder: Path) -> bool:
        """Whether what a folder holds was written by this work."""
        try:
            found = json.loads((folder / self.mark).read_text())
        except (OSError, ValueError):
            return False
        return bool(found == {"fingerprint": self.fingerprint})


def _holds_any(folder: Path) -> bool:
    """Whether a folder has a file, but for what another process just begins with; or is no folder."""
    try:
        return any(not name.startswith(TEMPORARY) for name in os.listdir(folder))
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        return True


@contextmanager
def reported(path: str | Path) -> Iterator[None]:
    """Errors of the file system as one line, with the name that the file was to get."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def write_at_once(path: Path, data: bytes) -> None:
    """Write a file that has its name when it is on the disk."""
    temporary = path.with_name(f"{TEMPORARY}{os.urandom(4).hex()}-{path.name}")
    write_durably(temporary, data)
    os.replace(temporary, path)
    sync_folder(path.parent)


def _lock(descriptor: int, folder: Path, work: str) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise UserError(f"another {work} writes {folder} now; wait for it, or name another output folder") from None
    except OSError:
        pass  # no locks here


def _sync_folders(folders: Sequence[str]) -> None:
    """Have the names of all files in some folders on the disk; the files are there already.

    Raises:
        OSError: of one of the folders; the others may not be there either.
    """
    errors: list[OSError] = []

    def sync(share: Sequence[str]) -> None:
        try:
            for folder in share:
                sync_folder(Path(folder))
        except OSError as error:  # in a thread it would be printed, and lost
            errors.append(error)

    # Each waits for the disk, and what the disk has to do for one it then does for all.
    others = [threading.Thread(target=sync, args=(folders[index::TOGETHER],)) for index in range(1, TOGETHER)]
    for thread in others:
        thread.start()
    sync(folders[::TOGETHER])
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
