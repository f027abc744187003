"""Read byte ranges of the checkpoint's files, by their numbers."""

import resource
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from ckpt_patches.convert.output_files import Slice
from ckpt_patches.errors import UserError
from ckpt_patches.formats.ranged import RangedFiles

Access = Literal["read", "mmap"]
SPARE_DESCRIPTORS = 64  # for everything else that a process has open


class Sources:
    """The files of a checkpoint, each opened when it is first needed, and kept open as long as there is room."""

    def __init__(self, paths: Sequence[Path], access: Access = "read") -> None:
        self._paths = [str(path) for path in paths]
        self._files = RangedFiles(_descriptors() - SPARE_DESCRIPTORS, mapped=access == "mmap")

    def __enter__(self) -> "Sources":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._files.close()

    def read_slice(self, slice_: Slice, begin: int, into: memoryview) -> None:
        """Fill a buffer with the bytes of a slice from `begin` on."""
        at = 0
        for file, offset, nbytes in slice_.runs(begin, begin + len(into)):
            self.read(file, offset, into[at : at + nbytes])
            at += nbytes

    def read(self, file: int, offset: int, into: memoryview) -> None:
        """Fill a buffer with a file's bytes from `offset` on.

        Raises:
            UserError: the file has become shorter, or cannot be read.
        """
        try:
            self._files.read(self._paths[file], offset, into)
        except OSError as error:
            raise UserError(f"{self._paths[file]} cannot be read: {error.strerror or error}") from None


def _descriptors() -> int:
    """How many a process may have open; a mapped file has one more, so that is half."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return min(hard, 8192) // 2 if hard != resource.RLIM_INFINITY else 4096
