"""Read the files of a checkpoint by their indices."""

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ckpt_patches.convert.output_files import Slice
from ckpt_patches.errors import UserError
from ckpt_patches.formats.ranged import RangedFiles

SPARE_DESCRIPTORS = 64  # for all other open files of a process


class Sources:
    """Byte ranges of the checkpoint's files, by file index."""

    def __init__(self, paths: Sequence[Path], files: RangedFiles) -> None:
        self._paths, self._files = [str(path) for path in paths], files

    def read_slice(self, slice_: Slice, begin: int, into: memoryview) -> None:
        """Fill a buffer with the bytes of a slice from `begin` on."""
        at = 0
        for file, offset, nbytes in slice_.runs(begin, begin + len(into)):
            self.read(file, offset, into[at : at + nbytes])
            at += nbytes

    def read(self, file: int, offset: int, into: memoryview) -> None:
        """Fill a buffer with a file's bytes from `offset` on.

        Raises:
            UserError: the file is too short now, or cannot be read.
        """
        try:
            self._files.read(self._paths[file], offset, into)
        except OSError as error:
            raise UserError(f"{self._paths[file]} cannot be read: {error.strerror or error}") from None


@contextmanager
def opened(paths: Sequence[Path]) -> Iterator[Sources]:
    """The files of a checkpoint, each opened at its first read and kept open while the limit of descriptors allows."""
    with RangedFiles(_descriptors() - SPARE_DESCRIPTORS) as files:
        yield Sources(paths, files)


def _descriptors() -> int:
    """Raise the limit of open files to the maximum, and return it, at most 4096."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return min(hard, 4096) if hard != resource.RLIM_INFINITY else 4096
