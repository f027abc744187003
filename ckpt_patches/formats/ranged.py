"""Read byte ranges of many files, of which the most recently used ones stay open."""

import errno
import os
import stat
from collections import OrderedDict
from types import TracebackType

MOST = 64  # open files at a time
LARGEST_METADATA = 100 << 20  # bytes


def open_regular(path: str | os.PathLike[str]) -> int:
    """The descriptor of a file. The builtin `open` takes three times as long, and there are thousands of files.

    Raises:
        OSError: the file cannot be opened, or is a pipe, a device or a folder, of which a read may not end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, "expected a regular file, found a pipe or a device", os.fspath(path))


def read_metadata(path: str | os.PathLike[str], most: int = LARGEST_METADATA) -> bytes:
    """The content of a file of metadata.

    Raises:
        OSError: as by `open_regular`, or it has more than `most` bytes, as a sparse file can.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(most + 1) if os.fstat(file.fileno()).st_size <= most else None
    if content is None or len(content) > most:
        raise OSError(errno.EFBIG, f"expected metadata of at most {most} bytes, found more", os.fspath(path))
    return content


class RangedFiles:
    """Open files by path. At the limit the least recently used one is closed; `with` or `close` closes all.

    A file that is replaced while it is open is still read with its old content.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._open: OrderedDict[str, int] = OrderedDict()  # descriptors, least recently used first

    def __enter__(self) -> "RangedFiles":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        while self._open:
            self._close_oldest()

    def read(self, path: str, offset: int, into: memoryview) -> None:
        """Fill a buffer with a file's bytes from `offset` on.

        Raises:
            OSError: the file cannot be read, or is too short. The error names the file.
        """
        descriptor = self.descriptor(path)
        try:
            while into:
                found = os.preadv(descriptor, [into], offset)
                if not found:
                    raise ValueError
                offset, into = offset + found, into[found:]
        except ValueError:
            raise OSError(errno.EIO, f"ends before its byte {offset + len(into)}, and did not before", path) from None
        except OSError as error:
            error.filename = error.filename or path
            raise

    def descriptor(self, path: str) -> int:
        """The descriptor of a file; valid until `most` other files have been requested.

        Raises:
            OSError: the file cannot be opened.
        """
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        if len(self._open) >= self._most:
            self._close_oldest()
        self._open[path] = open_regular(path)
        return self._open[path]

    def _close_oldest(self) -> None:
        os.close(self._open.popitem(last=False)[1])
