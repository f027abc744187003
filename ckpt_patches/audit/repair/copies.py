"""Copy a checkpoint, with one rank or several, and write repaired elements into the copy.

Nothing is written outside the copy, whatever the metadata contains.
"""

import errno
import fnmatch
import itertools
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ckpt_patches.errors import UserError
from ckpt_patches.formats.checkpoint import Stream
from ckpt_patches.formats.dtypes import item_size
from ckpt_patches.formats.paths import path_within

AT_A_TIME = 1 << 26  # bytes of a file that a process copies at once
BUFFER = 1 << 22  # bytes
COST_OF_A_FILE = 1 << 18  # bytes that are copied in the time to open one file


class Range(NamedTuple):
    """Bytes of a file of the checkpoint, by its name in the folder."""

    name: str
    begin: int
    end: int

    @property
    def cost(self) -> int:
        """The cost of copying it, in bytes."""
        return self.end - self.begin + COST_OF_A_FILE


def begin_copy(path: Path, copy: Path, but: str) -> list[Range]:
    """Create the folders and empty files of a copy. Returns the ranges to copy.

    Symlinks are followed, within the checkpoint. Names that match the pattern `but` are left out.

    Raises:
        LinkOutsideError: a symlink leads out of the checkpoint.
        UserError: an entry is neither a file nor a folder.
        OSError: an entry cannot be read or created.
    """
    copy.mkdir()
    ranges: list[Range] = []
    for folder, folders, files in os.walk(path, followlinks=True, onerror=_give_up):
        folders[:] = sorted(name for name in folders if not fnmatch.fnmatch(name, but))
        inner = Path(folder).relative_to(path)
        own = copy / inner
        for name in filter(lambda name: Path(folder, name).is_symlink(), (*folders, *files)):
            path_within(path, str(inner / name))
        for name in folders:
            (own / name).mkdir()
        for name in sorted(name for name in files if not fnmatch.fnmatch(name, but)):
            ranges += _ranges(Path(folder, name), str(Path(folder, name).relative_to(path)))
            (own / name).touch(exist_ok=False)
    return ranges


def _give_up(error: OSError) -> None:
    raise error


def _ranges(file: Path, name: str) -> Iterator[Range]:
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{file}: expected a file or a folder, which can be copied, found neither")
    for begin in range(0, max(found.st_size, 1), AT_A_TIME):
        yield Range(name, begin, min(begin + AT_A_TIME, found.st_size))


def copy_ranges(ranges: Iterable[Range], path: Path, copy: Path) -> None:
    """Copy ranges into the existing files of the copy.

    Raises:
        OSError: a file cannot be read or written, or is shorter than its range.
    """
    for name, own in itertools.groupby(ranges, key=lambda found: found.name):
        source, target = path / name, path_within(copy, name)
        with open(source, "rb") as reading, open(target, "r+b") as writing:
            for found in own:
                _copy(reading, writing, found, str(source))


def sync(ranges: Iterable[Range], copy: Path) -> None:
    """Flush the files that this process copied to disk: other machines cannot flush this machine's page cache."""
    for name in dict.fromkeys(found.name for found in ranges):
        with open(path_within(copy, name), "r+b") as file:
            os.fsync(file.fileno())


def _copy(reading: BinaryIO, writing: BinaryIO, found: Range, path: str) -> None:
    reading.seek(found.begin)
    writing.seek(found.begin)
    for at in range(found.begin, found.end, BUFFER):
        nbytes = min(BUFFER, found.end - at)
        data = reading.read(nbytes)
        if len(data) < nbytes:
            raise OSError(errno.EIO, f"ends before its byte {found.end}, and did not before", path)
        writing.write(data)


def end_copy(path: Path, copy: Path) -> None:
    """Copy times and modes to the files and folders of the copy, contents before their folder."""
    for folder, _, files in os.walk(copy, topdown=False):
        for own in (*(Path(folder, name) for name in files), Path(folder)):
            shutil.copystat(path / own.relative_to(copy), own)


def in_copy(name: str, path: Path, copy: Path) -> str:
    """The path in the copy for a file of the checkpoint at `path`.

    Raises:
        LeavesFolderError: it would be outside the copy.
        ValueError: the file is not the checkpoint's.
    """
    return str(path_within(copy, str(Path(name).relative_to(path))))


def copied(stream: Stream, path: Path, copy: Path) -> Stream:
    """The stream of the copy for a stream of the checkpoint."""
    extents = tuple(extent._replace(path=in_copy(extent.path, path, copy)) for extent in stream.extents)
    return stream._replace(extents=extents)


def write_elements(target: Stream, begin: int, data: bytes | memoryview) -> None:
    """Write elements from `begin` on. A missing file is created."""
    first, nbytes = begin * item_size(target.dtype), len(data)
    ends = itertools.accumulate(extent.nbytes for extent in target.extents)
    for extent, stop in zip(target.extents, ends, strict=True):
        start = stop - extent.nbytes
        low, high = max(first, start), min(first + nbytes, stop)
        if low < high:
            with open(extent.path, "r+b" if os.path.exists(extent.path) else "wb") as file:
                file.seek(extent.offset + low - start)
                file.write(data[low - first : high - first])
