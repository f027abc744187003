"""Pause the garbage collector, and warnings, while a tree or a large checkpoint is planned."""

import gc
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def without_syntax_warnings() -> Iterator[None]:
    """Ignore upstream's own, as about invalid escapes: without our hook, they appear only if bytecode is missing."""
    with warnings.catch_warnings():
        for kind in (SyntaxWarning, DeprecationWarning):  # the latter up to Python 3.11
            warnings.simplefilter("ignore", kind)
        yield


def _end_pause() -> None:
    """End the pause; also in a forked child, which does not plan."""
    global _paused
    if _paused:
        _paused = False
        gc.enable()


os.register_at_fork(after_in_child=_end_pause)
