"""An output folder that several processes start to write at once is never taken for a foreign one."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_patches.errors import UserError
from ckpt_patches.runtime.unfinished import UnfinishedFolder

MARK = "mark.json"


def folder(path: Path, fingerprint: str = "of this") -> UnfinishedFolder:
    return UnfinishedFolder(path / "output", fingerprint, MARK, "conversion")


_at_each_look: list[Callable[[], None]] = []


@sys.addaudithook
def _look(event: str, _: tuple[object, ...]) -> None:
    if _at_each_look and event in ("open", "os.listdir", "os.scandir"):
        _at_each_look[0]()


def check_while_another(path: Path, act: Callable[[], None], look: int) -> bool:
    """Run the check while another process acts before its look number `look`; return whether it looked that often."""
    looks = 0

    def at_each() -> None:
        nonlocal looks
        looks += 1
        if looks == look:
            at_that = _at_each_look.pop()
            act()
            _at_each_look.append(at_that)

    _at_each_look.append(at_each)
    try:
        folder(path).check([])
    finally:
        _at_each_look.clear()
    return looks >= look


@pytest.mark.parametrize("look", range(1, 6))
def test_another_process_of_this_work_begins_at_any_moment(look: int, tmp_path: Path) -> None:
    folder(tmp_path).working.mkdir()
    begun = check_while_another(tmp_path, folder(tmp_path).begin, look)
    assert begun == folder(tmp_path).is_of_this(folder(tmp_path).working)
    assert begun or look > 2


@pytest.mark.parametrize("look", range(1, 6))
def test_another_process_of_this_work_ends_at_any_moment(look: int, tmp_path: Path) -> None:
    folder(tmp_path).begin()
    ended = check_while_another(tmp_path, lambda: folder(tmp_path).rename([]), look)
    assert ended == folder(tmp_path).is_of_this(folder(tmp_path).final)
    assert ended or look > 2


def test_what_belongs_to_another_work_is_refused(tmp_path: Path) -> None:
    folder(tmp_path, "of another").begin()
    with pytest.raises(UserError, match="holds the unfinished conversion of another checkpoint"):
        folder(tmp_path).check([])
    os.rename(folder(tmp_path).working, folder(tmp_path).final)
    with pytest.raises(UserError, match="output exists; name another output folder"):
        folder(tmp_path).check([])
