"""Demonstrations of the fixes: how one ends, and what they share (CPU ranks, small trainings, a stub for a GPU).

A demonstration is a program in `demos/`, beside the fixes, with the fix's name. It does on the real upstream package
what users do, and prints one JSON object as its last line: whether the bug shows, and what was found. It does not know
whether the import hook is active.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from ckpt_patches.demo.ranks import RankError

T = TypeVar("T")
# The argument of a demonstration that is to show its bug in a few seconds, as `status --prove` asks for.
SHORT = "--short"


def cases(every: Sequence[T], short: int = 1) -> Sequence[T]:
    """The cases in which a demonstration looks for its bug: all, or with `--short` the first so many."""
    return every[:short] if SHORT in sys.argv else every


def show(run: Callable[[Path], str], right: str, *, raises: str | tuple[str, ...] = ()) -> None:
    """Run a demonstration in an empty folder, and print its outcome.

    `run` returns what went wrong, "" if nothing did; then `right` is printed. An error of a rank whose text begins with
    `raises` is the bug.

    Raises:
        RankError: another one.
    """
    with tempfile.TemporaryDirectory(prefix="ckpt-patches-demo-") as folder:
        try:
            wrong = run(Path(folder))
        except RankError as error:
            if not str(error).startswith(raises):
                raise
            wrong = str(error).replace(f"{folder}/", "")
    print("\n" + json.dumps({"bug": bool(wrong), "found": wrong or right}))
