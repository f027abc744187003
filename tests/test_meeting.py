"""The signs of life by which the processes of a group know each other: they go on, and silence is what others give."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ckpt_patches import meeting
from ckpt_patches.group import Group
from ckpt_patches.meeting import Meeting
from test_ds_to_universal_group import ELSEWHERE, ended, pair, wait_until_they_have_met
from universal import parallel

SIGNS = 4  # that have to come meanwhile, one each hundredth of a second at best


def test_all_others_end_within_a_minute_of_the_last_sign() -> None:
    """Noticed by one, said by it, and heard; and no single sign that is late, or two, make a process dead."""
    an_other_hears = 2 * (meeting.BEAT + meeting.LONGEST)
    assert meeting.SILENT + an_other_hears < 60
    assert meeting.SILENT >= 8 * meeting.BEAT
    assert meeting.A_LOOK_AT_MOST >= meeting.LONGEST + 2000 * meeting.A_LOOK


@pytest.fixture
def lively(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], int]]:
    """A process that gives signs often; how many it has given."""
    monkeypatch.setattr(meeting, "BEAT", 0.01)
    monkeypatch.setattr(meeting, "LONGEST", 0.01)
    monkeypatch.setattr(meeting, "HEARD", 0.0)  # here one ends after the other, which would wait for it
    with Meeting(Group(1, 2), tmp_path), Meeting(Group(0, 2), tmp_path) as first:

        def signs() -> int:
            first.check()
            heard = first._heard_of().get(1)
            return heard.beat if heard else 0

        while not signs():
            time.sleep(0.01)
        yield signs


def blocked_write(signs: Callable[[], int]) -> None:
    """A write that the other end takes only when signs have come meanwhile, or never should."""
    receiving, sending = os.pipe()
    before = signs()

    def empty() -> None:
        until = time.monotonic() + 30
        while signs() < before + SIGNS and time.monotonic() < until:
            time.sleep(0.01)
        while os.read(receiving, 1 << 20):
            pass

    reader = threading.Thread(target=empty)
    reader.start()
    os.write(sending, bytes(1 << 20))  # more than a pipe holds
    os.close(sending)
    reader.join()


def numpy_at_work(signs: Callable[[], int]) -> None:
    values = np.random.default_rng(1).random(10_000_000)
    np.sort(values)
    np.isfinite(values).all()


def synced(signs: Callable[[], int], file: Path) -> None:
    """So often that it takes some time on any disk."""
    with open(file, "wb", buffering=0) as writing:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            writing.write(bytes(8 << 20))
            os.fsync(writing.fileno())


@pytest.mark.parametrize("work", [blocked_write, numpy_at_work])
def test_signs_go_on_whatever_the_process_waits_for(
    work: Callable[[Callable[[], int]], None], lively: Callable[[], int]
) -> None:
    before = lively()
    work(lively)
    assert lively() >= before + SIGNS


def test_signs_go_on_while_it_waits_for_the_disk(lively: Callable[[], int], tmp_path: Path) -> None:
    before = lively()
    synced(lively, tmp_path / "file")
    assert lively() >= before + SIGNS


def test_a_time_in_which_nobody_could_be_heard_is_not_silence(tmp_path: Path) -> None:
    """A shared folder whose server does not answer for a minute, or machines that stood still."""
    clocks = "meeting.BEAT, meeting.SILENT, meeting.A_LOOK_AT_MOST = 0.2, 6, 1"
    slow = "import time; own = workers.Writer.write\ndef write(*given): time.sleep(0.5); return own(*given)"
    change = f"{clocks}\n{ELSEWHERE}\n{slow}\nworkers.Writer.write = write"
    running = pair(parallel("megatron")["megatron"], tmp_path / "universal", [change] * 2)
    wait_until_they_have_met(tmp_path / "universal", 2)
    for process in running:
        process.send_signal(signal.SIGSTOP)
    time.sleep(8)
    for process in running:
        process.send_signal(signal.SIGCONT)
    assert [ended(process) for process in running] == [(0, ""), (0, "")]
