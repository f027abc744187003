"""Forked processes that share work return equal results in equal order, even if one of them is killed."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckpt_patches.errors import UserError
from ckpt_patches.runtime.processes import in_order, mapped
from universal import command, environment, parallel
from upstream import TIMEOUT

ITEMS = list(range(10))


@pytest.fixture(autouse=True)
def _processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})


@pytest.fixture(scope="module")
def source() -> Path:
    """A checkpoint. The process that writes it stays alive."""
    return parallel("megatron")["megatron"]


@pytest.fixture(autouse=True)
def _nothing_is_left(source: Path) -> Any:
    """No process and no descriptor is left; those of earlier tests are ignored."""
    before = os.listdir("/proc/self/fd"), children()
    yield
    assert (os.listdir("/proc/self/fd"), children()) == before


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_the_error_of_the_first_item_is_raised_here() -> None:
    def fail(item: int) -> None:
        if item in (6, 9):
            raise UserError(f"rank {item} is damaged")

    with pytest.raises(UserError, match="rank 6 is damaged"):
        mapped(fail, ITEMS, 1)


def test_what_a_killed_process_has_not_done_is_done_here() -> None:
    here = os.getpid()

    def killed(item: int) -> int:
        if os.getpid() != here and item == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    assert mapped(killed, ITEMS, 1) == ITEMS


# Results in order


def test_results_come_in_the_order_of_the_items_and_workers_take_turns() -> None:
    """Also results that are larger than a pipe."""
    for found in (list(in_order(result, ITEMS, 3)), mapped(result, ITEMS, 1)):
        assert [data for data, _ in found] == [bytes([item]) * 300_000 for item in ITEMS]
        assert len({pid for _, pid in found} - {os.getpid()}) == 3


def result(item: int) -> tuple[bytes, int]:
    return bytes([item]) * 300_000, os.getpid()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UserError("rank 4 is damaged"), UserError("rank 4 is damaged")),
        (FileNotFoundError(2, "No such file", "/a"), FileNotFoundError(2, "No such file", "/a")),
        (MemoryError(), UserError("there is not enough memory for a worker process")),
    ],
)
def test_results_after_the_first_error_are_not_waited_for(error: Exception, expected: Exception) -> None:
    def fail(item: int) -> int:
        if item == 4:
            raise error
        if item > 4:
            signal.pause()
        return item

    found = in_order(fail, ITEMS, 3)
    assert [next(found) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(type(expected)) as raised:
        next(found)
    assert str(raised.value) == str(expected)


def test_where_no_second_process_can_be_made_the_first_is_stopped() -> None:
    """As with `ulimit -u` (which root ignores): the command ends."""
    program = """
import os, signal
from ckpt_patches.errors import UserError
from ckpt_patches.runtime.processes import in_order
fork, forks = os.fork, iter([True, False])

def limited():
    if not next(forks):
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()

os.fork = limited
try:
    list(in_order(lambda _: signal.pause(), range(3), 3))
except UserError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT)
    text = "cannot start worker process 2 of 3: Resource temporarily unavailable; take fewer"
    assert (done.stdout.partition(",")[0], done.stderr) == (text, "")


@pytest.mark.slow
def test_with_sigchld_ignored_as_some_parents_leave_it() -> None:
    """Workers run, and a killed one is reported, though the system reaps it and discards its exit status."""
    program = """
import os, signal
assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
os.sched_getaffinity = lambda _: {0, 1, 2}
from ckpt_patches.runtime.processes import WorkerDied, in_order
print(list(in_order(lambda item: item, range(10), 3)))
try:
    list(in_order(lambda item: os.kill(os.getpid(), signal.SIGKILL), range(3), 3))
except WorkerDied as error:
    print(str(error).partition(" ended ")[2])
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        preexec_fn=partial(signal.signal, signal.SIGCHLD, signal.SIG_IGN),
    )
    told = "before it was done; is there enough memory? Run the same command again"
    assert (done.stdout.splitlines(), done.stderr) == ([str(ITEMS), told], "")


def test_no_process_outlives_one_that_is_killed() -> None:
    """No worker outlives a killed parent: their shared output closes. All have more to send than a pipe holds."""
    program = """
import signal
from ckpt_patches.runtime.processes import in_order
results = in_order(lambda _: bytes(1 << 20), range(8), 2)
next(results), next(results)
print("full", flush=True)
signal.pause()
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    assert parent.stdout.readline() == "full\n"
    parent.kill()
    parent.communicate(timeout=TIMEOUT)


def test_a_ctrl_c_that_does_not_interrupt_the_system_call_is_seen() -> None:
    """As if it came between Python's last look for signals and the call; the process then waited forever."""

    def interrupt() -> None:
        time.sleep(0.2)  # the main thread is in its system call by now
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    def pause(item: int) -> None:
        if item:
            signal.pause()

    found, thread = in_order(pause, ITEMS, 1), threading.Thread(target=interrupt)

    def wait() -> None:
        thread.start()
        next(found)

    next(found)
    with pytest.raises(KeyboardInterrupt):
        wait()
    thread.join()


# The converter's workers

WRITE = """
import os, sys
from ckpt_patches.convert import convert_command as command, write as writing

def write(output, file, merger):
    {}

writing.write = write
sys.exit(command.main())
"""


def converting(tmp_path: Path, write: str) -> subprocess.Popen[str]:
    """The command in its own process group; `write` replaces the code that workers run for each file."""
    python, _, _, *options = command(parallel("megatron")["megatron"], tmp_path / "universal")
    return subprocess.Popen(
        [python, "-c", WRITE.format(write), *options],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_defect_of_the_converter_is_told_with_the_workers_traceback(tmp_path: Path) -> None:
    process = converting(tmp_path, "raise KeyError('group')")
    out, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, out) == (1, "")
    assert "this is a defect, please report it" in err
    assert re.search(
        r"in write\n(    raise KeyError\('group'\)\n)?KeyError: 'group'\n", err
    )  # Python 3.13 and later show this line


STOPS = "os.write(1, b'%d\\n' % os.getpid()); import time; time.sleep(600)"


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_and_a_killed_worker_end_the_conversion_in_one_line(signal_: int, tmp_path: Path) -> None:
    process = converting(tmp_path, STOPS)
    assert process.stdout
    pid = int(process.stdout.readline())
    if signal_ == signal.SIGINT:
        os.killpg(process.pid, signal_)  # as a terminal does, to all processes of the group
        expected = 130, "interrupted; the same command goes on from here"
    else:
        os.kill(pid, signal_)
        expected = (
            2,
            (
                f"worker process {pid} was killed (SIGKILL) before it was done; is there enough memory? Run the same "
                "command again"
            ),
        )
    _, err = process.communicate(timeout=TIMEOUT)  # returns when the last worker has closed its output
    assert (process.returncode, err) == (expected[0], f"ds_to_universal: {expected[1]}\n")
