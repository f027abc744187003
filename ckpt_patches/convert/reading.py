"""Read byte ranges of a checkpoint's files, and check the checksums of the records that they are in.

Each worker reads parts of many records. What a part contributes to the checksum of its record does not depend on the
order of the parts, so a worker keeps one number for each record, and no byte is read twice for the check.
"""

import bisect
import resource
from collections.abc import Iterable, Mapping
from contextlib import closing

from ckpt_patches.convert.output_files import Content, Records
from ckpt_patches.errors import UserError
from ckpt_patches.formats import checksum
from ckpt_patches.formats.ranged import RangedFiles

BLOCK = 1 << 20  # bytes
SPARE_DESCRIPTORS = 64  # for all other open files of a process

Seen = dict[tuple[str, int], tuple[int, int]]  # by file and record: the checksum of what was read of it, bytes


class Reader:
    """Reads the files of a checkpoint, which stay open while the limit of descriptors allows."""

    def __init__(self, files: RangedFiles, records: Mapping[str, Records]) -> None:
        self._files, self._records = files, records
        self.seen: Seen = {}
        self.close = files.close

    def read(self, path: str, offset: int, into: memoryview) -> None:
        """Fill a buffer with a file's bytes from `offset` on.

        Raises:
            UserError: the file is too short now, or cannot be read.
        """
        try:
            self._files.read(path, offset, into)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
        self._see(path, offset, into)

    def _see(self, path: str, offset: int, data: memoryview) -> None:
        """Add what was read to the checksums of its records."""
        if path not in self._records:
            return
        (begins, ends, _), end = self._records[path], offset + len(data)
        for number in range(bisect.bisect_right(ends, offset), bisect.bisect_left(begins, end)):
            part = data[max(begins[number] - offset, 0) : ends[number] - offset]
            rest = ends[number] - min(end, ends[number])
            before, nbytes = self.seen.get((path, number), (0, 0))
            self.seen[path, number] = before ^ checksum.shifted(checksum.crc32(part), rest), nbytes + len(part)


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
    with closing(opened({})) as reader:
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


class Shares:
    """The slices of a storage's content."""

    def __init__(self, reader: Reader, content: Content) -> None:
        self._reader, self._pieces = reader, [own.pieces() for own in content.slices]

    def read(self, number: int, begin: int, into: memoryview) -> None:
        """Fill a buffer with the bytes of a slice from `begin` on."""
        at = 0
        for path, offset, nbytes in self._pieces[number].within(begin, begin + len(into)):
            self._reader.read(path, offset, into[at : at + nbytes])
            at += nbytes


def opened(records: Mapping[str, Records]) -> Reader:
    """A reader of files that have these records."""
    return Reader(RangedFiles(_descriptors() - SPARE_DESCRIPTORS), records)


def _descriptors() -> int:
    """Raise the limit of open files to the maximum, and return it, at most 4096."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return min(hard, 4096) if hard != resource.RLIM_INFINITY else 4096
