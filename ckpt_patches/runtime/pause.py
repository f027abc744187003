"""A pause of the garbage collector, and of warnings, while a tree, or a large checkpoint, is planned."""

import gc
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_paused = False


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """A syntax tree is tens of thousands of objects, an index of chunks is millions: collecting takes as long."""
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
    """Upstream's own, as of an invalid escape: Python says them where it compiles a file, and then has its bytecode."""
    with warnings.catch_warnings():
        for kind in (SyntaxWarning, DeprecationWarning):  # the latter up to Python 3.11
            warnings.simplefilter("ignore", kind)
        yield


def _end_pause() -> None:
    """Also in the child of a fork meanwhile, in which nobody plans."""
    global _paused
    if _paused:
        _paused = False
        gc.enable()


os.register_at_fork(after_in_child=_end_pause)
