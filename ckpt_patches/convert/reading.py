"""Read byte ranges of a checkpoint's files, and check the checksums of their records."""

import bisect
import itertools
import resource
from collections.abc import Iterable, Sequence
from contextlib import closing

from ckpt_patches.errors import UserError
from ckpt_patches.formats.checkpoint import Extent
from ckpt_patches.formats.checksum import crc32
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.formats.stored_zip import Stored

BLOCK = 1 << 20  # bytes that are read, and written, at once; larger ones are not faster, and exceed a processor's cache
SPARE_DESCRIPTORS = 64  # for all other open files of a process

Records = tuple[str, Sequence[Stored]]  # of a file, by its path


class Reader:
    """Reads the files of a checkpoint, which stay open while the limit of descriptors allows."""

    def __init__(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        most = min(hard, 4096) if hard != resource.RLIM_INFINITY else 4096
        self._files = RangedFiles(most - SPARE_DESCRIPTORS)
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


def check(records: Records) -> None:
    """Check the checksums of a file's records.

    Raises:
        UserError: one is wrong, or cannot be read.
    """
    (path, stored), data = records, memoryview(bytearray(BLOCK))
    with closing(Reader()) as reader:
        for offset, nbytes, expected in stored:
            found = 0
            for begin in range(0, nbytes, BLOCK):
                part = data[: min(BLOCK, nbytes - begin)]
                reader.read(path, offset + begin, part)
                found = crc32(part, found)
            if found != expected:
                raise UserError(
                    f"{path} is damaged: the checksum of its {nbytes} bytes from {offset} on is wrong, and nothing was "
                    "converted; ckpt-patches audit names the tensors"
                )
