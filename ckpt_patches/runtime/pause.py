"""Pause the garbage collector, and warnings, while a tree or a large checkpoint is planned."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import get_ident
from typing import Any


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause collections: they would double the time to build a syntax tree or an index of millions of chunks."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
