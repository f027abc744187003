"""Pause the garbage collector, and warnings, while a tree or a large checkpoint is planned."""

import gc
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import get_ident
from typing import Any

_paused = False


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause collections: they would double the time to build a syntax tree or an index of millions of chunks."""
    global _paused
    if _paused or not gc.isenabled():
        yield
        return
    _paused = True
    gc.disable()
    try:
        yield
    finally:
        _end_pause()


class _Here:
    """As the module of a warnings filter, it matches in one thread, until the end of a pause."""

    def __init__(self) -> None:
        self.thread: int | None = get_ident()

    def match(self, module: str) -> bool:
        return self.thread == get_ident()


@contextmanager
def without_syntax_warnings() -> Iterator[None]:
    """Ignore upstream's own, as about invalid escapes: without our hook, they appear only if bytecode is missing.

    `warnings.catch_warnings` would drop the filters that other threads add meanwhile.
    """
    here, kinds = _Here(), (SyntaxWarning, DeprecationWarning)  # the latter up to Python 3.11
    ours: list[Any] = [("ignore", None, kind, here, 0) for kind in kinds]
    warnings.filters[:0] = ours  # type: ignore[index]  # a list
    try:
        yield
    finally:
        here.thread = None
        for one in ours:
            with suppress(ValueError):  # another thread has taken it away
                warnings.filters.remove(one)  # type: ignore[attr-defined]


def _end_pause() -> None:
    """End the pause; also in a forked child, which does not plan."""
    global _paused
    if _paused:
        _paused = False
        gc.enable()


os.register_at_fork(after_in_child=_end_pause)
