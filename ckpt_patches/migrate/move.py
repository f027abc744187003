"""Write the files of a plan: read each byte of the source once, judge it, and write it to its place.

The audit's scan reads the bytes, which are written before the scan continues. The odd elements are stored next to each
file until all files are written and can be judged together. A migration that was killed thus keeps them.
"""

import bisect
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ckpt_patches.audit.judging import scan
from ckpt_patches.audit.judging.scan import Part
from ckpt_patches.errors import UserError
from ckpt_patches.formats.checkpoint import Extent, Shard
from ckpt_patches.formats.checksum import combined, crc32
from ckpt_patches.formats.elements import PartRead
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.migrate.entry_layout import Torch
from ckpt_patches.migrate.judged_parts import decoded, encoded
from ckpt_patches.migrate.migration_plan import OutputFile
from ckpt_patches.runtime.durable import make_folder
from ckpt_patches.runtime.shared_writing import Moved
from ckpt_patches.runtime.unfinished import TEMPORARY, reported, write_at_once

JUDGED = ".judged"  # folder with the odd elements of each file
READ_AGAIN = 1 << 20  # bytes per read
SENT_TOGETHER = 32 << 20  # bytes per flush


@dataclass(frozen=True)
class Job:
    """The settings that all files of a migration share."""

    folder: Path  # to write to
    shards: tuple[Shard, ...]
    sync: bool = True  # flush a file to disk before it gets its final name


class _Written(NamedTuple):
    """A file that has a temporary name."""

    file: OutputFile
    descriptor: int
    temporary: Path
    found: list[Part]


@contextmanager
def writer(job: Job, _workers: int, moved: Moved) -> Iterator["Writer"]:
    """Create a worker's writer."""
    make_folder(job.folder / JUDGED)
    yield Writer(job, moved)


class Writer:
    """Writes files one by one. Calls `moved` with each number of bytes read for them.

    A file gets its final name when it is on disk, at the latest in `finish`.
    """

    def __init__(self, job: Job, moved: Moved) -> None:
        self.job, self.moved = job, moved
        self._written: list[_Written] = []

    def write(self, file: OutputFile) -> None:
        """Write a file under a temporary name.

        Raises:
            UserError: the disk is full, or a file of the source cannot be read.
        """
        path = self.job.folder / file.name
        temporary = self.job.folder / f"{TEMPORARY}{os.urandom(4).hex()}-{file.name}"
        with reported(path):
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                found = _fill(descriptor, file, self.job, self.moved)
            except BaseException:
                temporary.unlink(missing_ok=True)
                os.close(descriptor)
                raise
        self._written.append(_Written(file, descriptor, temporary, found))
        if len(self._written) > 1:  # the next file is written while the disk flushes one
            self._finish(self._written.pop(0))

    def finish(self) -> None:
        """Flush the remaining files to disk and give them their final names."""
        while self._written:
            self._finish(self._written.pop(0))

    def _finish(self, written: _Written) -> None:
        """Flush and rename a file, and store its odd elements next to it."""
        path = self.job.folder / written.file.name
        try:
            with reported(path):
                if self.job.sync:
                    os.fsync(written.descriptor)
                write_at_once(self.job.folder / JUDGED / written.file.name, encoded(written.found))
                os.replace(written.temporary, path)
        except BaseException:
            written.temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(written.descriptor)


def _fill(descriptor: int, file: OutputFile, job: Job, moved: Moved) -> list[Part]:
    """Write all bytes of a file. Returns the odd elements in the bytes that were read for it."""
    found: list[Part] = []
    os.truncate(descriptor, file.nbytes)
    with Tee(descriptor, _targets(file), job.sync) as tee:
        for number in file.shards:
            for span in scan.spans_of(number, job.shards[number], checked=True):
                scan.add(scan.look(span, tee), found)
                moved(span.nbytes)
    read = _Read(descriptor, (piece for part in found for piece in part.pieces))
    begin = 0
    for item in file.items:
        if isinstance(item.content, Torch):
            own = zip(item.content.sources, item.content.places, item.content.storages, strict=True)
            checksums = [read.checksum(source, begin + place, nbytes) for source, place, (_, nbytes) in own]
            for offset, data in item.content.around(checksums):
                _put(descriptor, begin + offset, data)
        begin += item.content.nbytes
    return found


Target = tuple[int, int, int]  # begin and end in a source file, offset in the output file


def _targets(file: OutputFile) -> Iterator[tuple[str, Target]]:
    """The targets of an output file, each with its source file."""
    begin = 0
    for item in file.items:
        for source, place in zip(item.content.sources, item.content.places, strict=True):
            at = begin + place
            for extent in source:
                yield extent.path, (extent.offset, extent.offset + extent.nbytes, at)
                at += extent.nbytes
        begin += item.content.nbytes


class Tee(RangedFiles):
    """Source files. Each byte read from them is also written to its place in an output file."""

    def __init__(self, descriptor: int, targets: Iterable[tuple[str, Target]], sync: bool) -> None:
        super().__init__()
        self._descriptor, self._sync = descriptor, sync
        self._unsent = 0  # bytes written since the last flush
        # By path, lists of disjoint targets. Several lists, as the same bytes can go to several places.
        self._layers: dict[str, list[list[Target]]] = {}
        for path, target in sorted(targets):
            layers = self._layers.setdefault(path, [[]])
            free = next((layer for layer in layers if not layer or layer[-1][1] <= target[0]), None)
            if free is None:
                layers.append(free := [])
            free.append(target)

    def read(self, path: str, offset: int, into: memoryview) -> None:
        try:
            super().read(path, offset, into)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        end = offset + len(into)
        for layer in self._layers.get(path, []):
            for first, last, at in layer[max(bisect.bisect_right(layer, (offset, end, 0)) - 1, 0) :]:
                if first >= end:
                    break
                low, high = max(first, offset), min(last, end)
                if low < high:
                    _put(self._descriptor, at + low - first, into[low - offset : high - offset])
                    self._send(high - low)

    def _send(self, nbytes: int) -> None:
        """Start a flush to disk while the next bytes are read, to shorten the wait at the end."""
        self._unsent += nbytes
        if self._sync and self._unsent >= SENT_TOGETHER:
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            self._unsent = 0


def _put(descriptor: int, offset: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, offset)
        offset, left = offset + written, left[written:]


class _Read:
    """Checksums of the output's storages, combined from those of the pieces that were read."""

    def __init__(self, descriptor: int, pieces: Iterable[PartRead]) -> None:
        self._descriptor = descriptor
        self._pieces = {(piece.path, piece.offset): piece for piece in pieces}

    def checksum(self, source: Sequence[Extent], place: int, nbytes: int) -> int:
        """The checksum of the bytes at a place of the output. If the pieces do not add up to the source ranges, the
        written bytes are read back.
        """
        found = 0
        for extent in source:
            at, end = extent.offset, extent.offset + extent.nbytes
            while at < end:
                piece = self._pieces.get((extent.path, at))
                if piece is None or at + piece.nbytes > end:
                    return self._written(place, nbytes)
                found, at = combined(found, piece.crc, piece.nbytes), at + piece.nbytes
        return found

    def _written(self, place: int, nbytes: int) -> int:
        found = 0
        for at in range(0, nbytes, READ_AGAIN):
            found = crc32(os.pread(self._descriptor, min(READ_AGAIN, nbytes - at), place + at), found)
        return found


def judged_parts(folder: Path, files: Sequence[OutputFile], count: int) -> Iterator[Part]:
    """The stored results of `count` shards, in order."""
    file_of = {shard: file for file in files for shard in file.shards}
    name, parts = "", dict[int, Part]()
    for number in range(count):
        file = file_of[number]
        if file.name != name:
            name = file.name
            parts = {part.shard: part for part in decoded((folder / JUDGED / name).read_bytes())}
        if number in parts:  # a shard without elements has none
            yield parts[number]
