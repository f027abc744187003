"""Work that forked processes share: the same results in the same order, whatever becomes of a process."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from ckpt_patches.errors import UserError
from deepspeed_patches.ds_to_universal.processes import Child, mapped, wait

ITEMS = list(range(10))


@pytest.fixture(autouse=True)
def _processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Any:
    yield
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_each_processor_does_a_share() -> None:
    found = mapped(lambda item: (item, os.getpid()), ITEMS, 1)
    assert [item for item, _ in found] == ITEMS
    assert len({pid for _, pid in found}) == 3
    assert found[0][1] == os.getpid()


@pytest.mark.parametrize(("items", "processes"), [(0, 1), (7, 1), (8, 2), (11, 2), (12, 3), (1000, 3)])
def test_few_items_are_not_worth_a_process(items: int, processes: int) -> None:
    assert len({os.getpid(), *mapped(lambda _: os.getpid(), range(items), 4)}) == processes


def test_results_larger_than_a_pipe() -> None:
    assert mapped(lambda item: bytes([item]) * 300_000, ITEMS, 1) == [bytes([item]) * 300_000 for item in ITEMS]


def test_results_that_cannot_be_sent() -> None:
    found: list[Callable[[], int]] = mapped(lambda item: lambda: item, ITEMS, 1)
    assert [one() for one in found] == ITEMS


def test_the_error_of_the_first_item_is_raised_here() -> None:
    def fail(item: int) -> None:
        if item in (6, 9):
            raise UserError(f"rank {item} is damaged")

    with pytest.raises(UserError, match="rank 6 is damaged"):
        mapped(fail, ITEMS, 1)


def test_an_error_here_stops_the_others() -> None:
    def fail(item: int) -> None:
        if not item:
            raise UserError("rank 0 is damaged")
        signal.pause()

    with pytest.raises(UserError, match="rank 0"):
        mapped(fail, ITEMS, 1)


def test_what_a_killed_process_has_not_done_is_done_here() -> None:
    here = os.getpid()

    def killed(item: int) -> int:
        if os.getpid() != here and item == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    assert mapped(killed, ITEMS, 1) == ITEMS


def test_a_process_that_dies_is_told() -> None:
    child = Child(lambda: os.kill(os.getpid(), signal.SIGKILL) or b"")  # type: ignore[func-returns-value]
    assert wait([child], 10) == [child]
    with pytest.raises(UserError, match="a worker ended with status -9; run the same command again"):
        child.answer()
    child.stop()


def test_no_process_outlives_one_that_is_killed() -> None:
    """Both have more to send than a pipe holds; that they are gone is seen by the end of the output they share."""
    program = """
import signal
from deepspeed_patches.ds_to_universal.processes import Child, wait
children = [Child(lambda: bytes(1 << 20)) for _ in range(2)]
for child in children:
    wait([child], 60)
print("full", flush=True)
signal.pause()
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    assert parent.stdout.readline() == "full\n"
    parent.kill()
    parent.communicate(timeout=60)


def test_nobody_is_ready_before_it_answers() -> None:
    child = Child(lambda: signal.pause() or b"")  # type: ignore[func-returns-value]
    assert wait([child], 0.01) == []
    child.stop()
