"""Read byte ranges of many files: each is opened when it is first read, and closed at the end of the work."""

import errno
import os
from collections import OrderedDict
from types import TracebackType

MOST = 64  # files open at a time


class RangedFiles:
    """Files by path. Those used last stay open as long as there is room; all are closed by `with`, or by `close`.

    A file that gets another content under the same path meanwhile is read as it was when it was opened.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._open: OrderedDict[str, int] = OrderedDict()  # descriptors; the one used last is last

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
            OSError: the file cannot be read, or is shorter; it names the file.
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
        """Of an open file; valid until so many others have been asked for as may be open.

        Raises:
            OSError: the file cannot be opened.
        """
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        if len(self._open) >= self._most:
            self._close_oldest()
        self._open[path] = os.open(path, os.O_RDONLY)
        return self._open[path]

    def _close_oldest(self) -> None:
        os.close(self._open.popitem(last=False)[1])
