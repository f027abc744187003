"""Shared code of the demonstrations: the output of an outcome, CPU ranks, small training runs, a stub GPU.

A demonstration is a program in `tests/demos/` with the fix's name. It uses the real upstream package as
users do, and prints one JSON object as its last line: whether the bug shows, and what was found. It does not know
whether the import hook is active.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from trainers.ranks import RankError

T = TypeVar("T")
# The argument that limits a demonstration to a few seconds.
SHORT = "--short"


def cases(every: Sequence[T], short: int = 1) -> Sequence[T]:
    """The cases that a demonstration runs: all, or the first `short` ones with `--short`."""
    return every[:short] if SHORT in sys.argv else every


def show(run: Callable[[Path], str], right: str, *, raises: str | tuple[str, ...] = ()) -> None:
    """Run a demonstration in an empty folder, and print its outcome.

    `run` returns a description of the bug, or "" without a bug; then `right` is printed. A rank's error whose text
    begins with `raises` counts as the bug.

    Raises:
        RankError: a rank failed with any other error.
    """
    with tempfile.TemporaryDirectory(prefix="ckpt-patches-demo-") as folder:
        try:
            wrong = run(Path(folder))
        except RankError as error:
            if not str(error).startswith(raises):
                raise
            wrong = str(error).replace(f"{folder}/", "")
    print("\n" + json.dumps({"bug": bool(wrong), "found": wrong or right}))
