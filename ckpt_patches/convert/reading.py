"""Read byte ranges of a checkpoint's files, and check the checksums of the records that they are in.

Each worker reads parts of many records. What a part contributes to the checksum of its record does not depend on the
order of the parts, so a worker keeps one number for each record, and no byte is read twice for the check.
"""

import bisect
import itertools
import resource
from array import array
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import NamedTuple

from ckpt_patches.errors import UserError
from ckpt_patches.formats import checksum
from ckpt_patches.formats.checkpoint import Extent
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.formats.stored_zip import Stored

BLOCK = 1 << 20  # bytes
SPARE_DESCRIPTORS = 64  # for all other open files of a process

Seen = dict[tuple[str, int], tuple[int, int]]  # by file and record: the checksum of what was read of it, bytes


class Records(NamedTuple):
    """The records of a file, in the order of their offsets. Arrays: workers share memory that they only read."""

    begins: "array[int]"
    ends: "array[int]"
    checksums: "array[int]"

    @classmethod
    def of(cls, stored: Iterable[Stored]) -> "Records":
        own = sorted(stored)
        columns = [one.offset for one in own], [one.offset + one.nbytes for one in own], [one.checksum for one in own]
        return cls(*(array("Q", column) for column in columns))


class Reader:
    """Reads the files of a checkpoint, which stay open while the limit of descriptors allows."""

    def __init__(self, records: Mapping[str, Records] | None = None) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        most = min(hard, 4096) if hard != resource.RLIM_INFINITY else 4096
        self._files, self._records = RangedFiles(most - SPARE_DESCRIPTORS), records or {}
        self.seen: Seen = {}
        self.close = self._files.close

    def read(self, path: str, offset: int, into: memoryview) -> None:
        """Fill a buffer with a file's bytes from `offset` on.

        Raises:
            UserError: the file is too short now, or cannot be read.
        """
        try:
            self._files.read(path, offset, into)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
        if path not in self._records:
            return
        (begins, ends, _), end = self._records[path], offset + len(into)
        for number in range(bisect.bisect_right(ends, offset), bisect.bisect_left(begins, end)):
            part = into[max(begins[number] - offset, 0) : ends[number] - offset]
            rest = ends[number] - min(end, ends[number])
            before, nbytes = self.seen.get((path, number), (0, 0))
            self.seen[path, number] = before ^ checksum.shifted(checksum.crc32(part), rest), nbytes + len(part)


class Elements:
    """The bytes of a slice, which lie in ranges of the ranks' files."""

    def __init__(self, reader: Reader, extents: Iterable[Extent]) -> None:
        self._reader = reader
        self._extents = [extent for extent in extents if extent.nbytes]
        self._ends = [*itertools.accumulate(extent.nbytes for extent in self._extents)]

    def read(self, begin: int, into: memoryview) -> None:
        """Fill a buffer with the slice's bytes from `begin` on."""
        at, index = 0, bisect.bisect_right(self._ends, begin)
        while at < len(into):
            path, offset, nbytes = self._extents[index]
            skipped = begin + at - (self._ends[index] - nbytes)
            length = min(nbytes - skipped, len(into) - at)
            self._reader.read(path, offset + skipped, into[at : at + length])
            at, index = at + length, index + 1

    @property
    def file(self) -> str:
        """The path of the first file with bytes of it."""
        return self._extents[0].path if self._extents else ""


def check(records: Mapping[str, Records], seen: Iterable[Seen]) -> None:
    """Check the checksums of records. One of which not each byte was seen once is read again.

    Raises:
        UserError: one is wrong, or cannot be read.
    """
    found: Seen = {}
    for own in seen:
        for key, (crc, nbytes) in own.items():
            before = found.get(key, (0, 0))
            found[key] = before[0] ^ crc, before[1] + nbytes
    with closing(Reader()) as reader:
        for path, own_records in records.items():
            for number, (begin, end, crc) in enumerate(zip(*own_records, strict=True)):
                if found.get((path, number)) != (crc, end - begin) and _crc(reader, path, begin, end) != crc:
                    raise UserError(
                        f"{path} is damaged: the checksum of its {end - begin} bytes from {begin} on is wrong, and it "
                        "was not converted; ckpt-patches audit names the tensors"
                    )


def _crc(reader: Reader, path: str, begin: int, end: int) -> int:
    crc, data = 0, memoryview(bytearray(min(end - begin, BLOCK)))
    for offset in range(begin, end, BLOCK):
        part = data[: min(BLOCK, end - offset)]
        reader.read(path, offset, part)
        crc = checksum.crc32(part, crc)
    return crc
