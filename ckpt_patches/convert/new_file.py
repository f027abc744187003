"""Write a new file from its beginning to its end, past the page cache where that is asked for and can be done.

What is converted is read by other machines next. To copy it into this one's page cache, and to wait until it has gone
from there to the disk, takes longer than all else on a local disk. (`file_systems` says where it is asked for.)
"""

import errno
import fcntl
import os
from contextlib import suppress
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from typing import Any

PAGE = 4096  # bytes; direct writes begin, end and lie in memory at multiples of it
WORTH_IT = 16 * PAGE  # a smaller file is written faster through the page cache
CACHED_AT_ONCE = 1 << 18  # bytes; the kernel takes longer to find memory for more in one piece


def pages(nbytes: int) -> memoryview:
    """Memory of this process alone, in whole pages: writing from shared memory takes the kernel twice as long.

    In huge pages, where there are any, as then a write is one piece for the disk and not one for each page of 4 KiB.
    """
    memory = mmap(-1, max(1, nbytes // PAGE) * PAGE, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(MADV_HUGEPAGE)
    return memoryview(memory)


class NewFile:
    """A file that is written in order. `buffer` collects what is written at once; it is of `pages`."""

    def __init__(self, path: str | Path, buffer: memoryview, *, direct: bool) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._direct = direct
        try:
            self._descriptor = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o666)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            self._direct = False  # the file system knows no direct writes
            self._descriptor = os.open(path, flags, 0o666)
        self._buffer = buffer
        self._held = 0  # bytes in the buffer
        self._written = 0
        self._lent: memoryview | None = None

    def tell(self) -> int:
        return self._written + self._held

    def room(self, most: int) -> memoryview:
        """A part of the buffer, to be filled and then given to `write`, which need not copy it."""
        if self._held == len(self._buffer):
            self._write(self._held)
        self._lent = self._buffer[self._held :][:most]
        return self._lent

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if data is self._lent:
            self._held, self._lent = self._held + len(view), None
            return len(view)
        taken = 0
        while taken < len(view):
            part = view[taken : taken + len(self._buffer) - self._held]
            self._buffer[self._held : self._held + len(part)] = part
            self._held += len(part)
            taken += len(part)
            if self._held == len(self._buffer):
                self._write(self._held)
        return taken

    def finish(self) -> None:
        """Write what is left: whole pages, and then the rest through the page cache."""
        if self._held > WORTH_IT or self._written:
            self._write(self._held // PAGE * PAGE)
        self._through_the_page_cache()
        self._write(self._held)

    def sync(self) -> None:
        """Wait until the file is on the disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self, nbytes: int) -> None:
        """Write the first bytes of the buffer."""
        left = self._buffer[:nbytes]
        while left:
            try:
                left = left[os.write(self._descriptor, left if self._direct else left[:CACHED_AT_ONCE]) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._through_the_page_cache()
            if len(left) % PAGE:  # the disk is full, or a limit is reached; the next write says which
                self._through_the_page_cache()
        rest = self._held - nbytes
        self._buffer[:rest] = self._buffer[nbytes : self._held]
        self._held, self._written = rest, self._written + nbytes

    def _through_the_page_cache(self) -> None:
        """Write no longer directly, from here on."""
        if self._direct:
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            self._direct = False
