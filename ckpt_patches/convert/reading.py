"""Read byte ranges of a checkpoint's files, and check the checksums of their records."""

import resource
from collections.abc import Iterable, Sequence

from ckpt_patches.errors import UserError
from ckpt_patches.formats.checkpoint import Extent, Joined
from ckpt_patches.formats.checksum import crc32
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.formats.stored_zip import Stored

BLOCK = 1 << 18  # bytes that are read, and written, at once; larger ones exceed a processor's cache, and take longer
SPARE_DESCRIPTORS = 64  # for all other open files of a process

Records = tuple[str, Sequence[Stored]]  # of a file, by its path


def open_files() -> RangedFiles:
    """The files of a checkpoint to read, which stay open while the limit of descriptors allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = min(hard, 4096) if hard != resource.RLIM_INFINITY else 4096
    return RangedFiles(most - SPARE_DESCRIPTORS)


class Elements:
    """The bytes of a slice, which lie in ranges of the ranks' files."""

    def __init__(self, files: RangedFiles, extents: Iterable[Extent]) -> None:
        self._files, self._joined = files, Joined(extents)

    def read(self, begin: int, into: memoryview) -> None:
        """Fill a buffer with the slice's bytes from `begin` on.

        Raises:
            OSError: a file is too short now, or cannot be read. The error names it.
        """
        for path, offset, nbytes in self._joined.part(begin, begin + len(into)):
            self._files.read(path, offset, into[:nbytes])
            into = into[nbytes:]

    @property
    def file(self) -> str:
        """The path of the first file with bytes of it."""
        return self._joined.extents[0].path if self._joined.extents else ""


def check(records: Records) -> None:
    """Check the checksums of a file's records.

    Raises:
        UserError: one is wrong.
        OSError: the file cannot be read.
    """
    (path, stored), data = records, memoryview(bytearray(BLOCK))
    with RangedFiles() as files:
        for offset, nbytes, expected in stored:
            found = 0
            for begin in range(0, nbytes, BLOCK):
                part = data[: min(BLOCK, nbytes - begin)]
                files.read(path, offset + begin, part)
                found = crc32(part, found)
            if found != expected:
                raise UserError(
                    f"{path} is damaged: the checksum of its {nbytes} bytes from {offset} on is wrong, and nothing was "
                    "converted; ckpt-patches audit names the tensors"
                )
