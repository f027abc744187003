"""A progress line with bytes, rate and time left, on a terminal only."""

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TextIO

from ckpt_patches.runtime.processes import Item, Result, in_order
from ckpt_patches.runtime.terminal import Output
from ckpt_patches.runtime.units import in_bytes


class Progress:
    """A progress line on standard error, if that is a terminal."""

    INTERVAL = 0.2  # seconds

    def __init__(self, total: int, file: TextIO | None = None, *, label: str = "") -> None:
        self._total, self._file, self._label = total, file or sys.stderr, label
        self._shown = self._file.isatty() and not Output.quiet
        self._begin = self._last = time.monotonic()

    def show(self, done: int) -> None:
        """Show how many bytes are done, at most once per `INTERVAL`."""
        now = time.monotonic()
        if self._shown and now - self._last >= self.INTERVAL:
            self._last = now
            self._file.write(f"\r{self._label}{line(done, self._total, now - self._begin)}\x1b[K")
            self._file.flush()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown:
            self._file.write("\r\x1b[K")
            self._file.flush()


def line(done: int, total: int, seconds: float) -> str:
    """'  42% 1.2 GiB of 2.8 GiB, 712.5 MiB/s, 2 s left'"""
    rate = done / seconds if seconds > 0 else 0.0
    left = f"{(total - done) / rate:.0f} s left" if rate else "? s left"
    share = done / total if total else 1.0
    return f"{share:5.0%} {in_bytes(done)} of {in_bytes(total)}, {in_bytes(rate)}/s, {left}"


def with_progress(values: Iterable[Result], nbytes: Sequence[int], label: str = "") -> Iterator[Result]:
    """The values, with a progress line; `nbytes` is what each has taken to read or write."""
    with Progress(sum(nbytes), label=label) as progress:
        for done, value in zip(itertools.accumulate(nbytes), values, strict=True):
            progress.show(done)
            yield value


def shown_in_order(
    function: Callable[[Item], Result], items: Sequence[Item], nbytes: Sequence[int], count: int, label: str = ""
) -> Iterator[Result]:
    """As `in_order`, with a progress line; `nbytes` is that of each item."""
    return with_progress(in_order(function, items, count), nbytes, label)
