"""Read byte ranges of the checkpoint's files: by a read each, or from files that are mapped into memory."""

import mmap
import os
import resource
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from ckpt_patches.errors import UserError
from deepspeed_patches.ds_to_universal.outputs import Slice

Access = Literal["read", "mmap"]
SPARE_DESCRIPTORS = 64  # for everything else that a process has open


class Sources:
    """The files of a checkpoint, each opened when it is first needed, and kept open as long as there is room."""

    def __init__(self, paths: Sequence[Path], access: Access = "read") -> None:
        self._paths = paths
        self._access = access
        self._open: OrderedDict[int, int] = OrderedDict()  # descriptors; the one used last is last
        self._maps: dict[int, memoryview] = {}
        self._room = _descriptors() - SPARE_DESCRIPTORS

    def __enter__(self) -> "Sources":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self._open:
            self._close_oldest()

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
            descriptor = self._descriptor(file)
            if self._access == "mmap":
                into[:] = self._mapped(file, descriptor)[offset : offset + len(into)]
                return
            while into:
                found = os.preadv(descriptor, [into], offset)
                if not found:
                    raise ValueError("it is shorter than when the conversion began")
                offset, into = offset + found, into[found:]
        except (OSError, ValueError) as error:
            raise UserError(f"{self._paths[file]} cannot be read: {error}") from None

    def _descriptor(self, file: int) -> int:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        if len(self._open) >= self._room:
            self._close_oldest()
        self._open[file] = os.open(self._paths[file], os.O_RDONLY)
        return self._open[file]

    def _mapped(self, file: int, descriptor: int) -> memoryview:
        if file not in self._maps:
            self._maps[file] = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
        return self._maps[file]

    def _close_oldest(self) -> None:
        file, descriptor = self._open.popitem(last=False)
        os.close(descriptor)
        if file in self._maps:
            mapped = self._maps.pop(file)
            whole = mapped.obj
            mapped.release()
            whole.close()  # type: ignore[attr-defined]


def _descriptors() -> int:
    """How many a process may have open; a mapped file has one more, so that is half."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return min(hard, 8192) // 2 if hard != resource.RLIM_INFINITY else 4096
