"""Forked processes that share work return equal results in equal order, even if one of them is killed."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckpt_patches.errors import UserError, WorkerDefect
from ckpt_patches.runtime.processes import Worker, WorkerDied, in_order, mapped, started
from universal import command, environment, parallel
from upstream import TIMEOUT

ITEMS = list(range(10))
Run = Callable[[], Iterable[Any]]


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


def test_each_processor_does_a_share() -> None:
    found = mapped(lambda item: (item, os.getpid()), ITEMS, 1)
    assert [item for item, _ in found] == ITEMS
    assert len({pid for _, pid in found} - {os.getpid()}) == 3


@pytest.mark.parametrize(("items", "processes"), [(0, 1), (7, 1), (8, 2), (11, 2), (12, 3), (1000, 3)])
def test_few_items_are_not_worth_a_process(items: int, processes: int) -> None:
    found = set(mapped(lambda _: os.getpid(), range(items), 4))
    assert len(found | {os.getpid()}) == 1 if processes == 1 else len(found - {os.getpid()}) == processes


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


def test_what_a_killed_process_has_not_done_is_done_here() -> None:
    here = os.getpid()

    def killed(item: int) -> int:
        if os.getpid() != here and item == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    assert mapped(killed, ITEMS, 1) == ITEMS


# One worker


def paused() -> Iterator[None]:
    signal.pause()
    yield


def killed() -> Iterator[None]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield


def failing(error: BaseException) -> Run:
    def fail() -> Iterator[None]:
        raise error
        yield

    return fail


def test_a_worker_that_is_killed_is_told() -> None:
    text = r"was killed \(SIGKILL\) before it was done; is there enough memory"
    with started([killed]) as (worker,), pytest.raises(WorkerDied, match=text):
        worker.receive()


@pytest.mark.parametrize("error", [UserError("rank 3 is damaged"), FileNotFoundError(2, "No such file", "/a")])
def test_what_went_wrong_in_a_worker_is_raised_here(error: Exception) -> None:
    with started([failing(error)]) as (worker,), pytest.raises(type(error)) as raised:
        worker.receive()
    assert str(raised.value) == str(error)


def test_a_defect_is_told_with_its_traceback() -> None:
    with started([failing(KeyError("rank"))]) as (worker,), pytest.raises(WorkerDefect) as raised:
        worker.receive()
    assert "please report it" in str(raised.value)
    assert f'File "{__file__}", line' in str(raised.value)
    assert str(raised.value).endswith("in fail\n    raise error\nKeyError: 'rank'")


def test_too_little_memory_is_not_a_defect() -> None:
    with started([failing(MemoryError())]) as (worker,), pytest.raises(UserError, match="not enough memory"):
        worker.receive()


def test_where_no_second_process_can_be_made_the_first_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process is stopped if no second can start, as with `ulimit -u` (which root ignores)."""
    fork, forks = os.fork, iter([True, False])

    def limited() -> int:
        if not next(forks):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", limited)
    text = "cannot start worker process 2 of 3: Resource temporarily unavailable; take fewer"
    with pytest.raises(UserError, match=text), started([paused] * 3):
        pass


@pytest.mark.slow
def test_with_sigchld_ignored_as_some_parents_leave_it() -> None:
    """Workers run, and a killed one is reported, though the system reaps it and discards its exit status."""
    program = f"""
import os, signal, sys
sys.path[:0] = {sys.path!r}
assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
os.sched_getaffinity = lambda _: {{0, 1, 2}}
import test_processes as tests
from ckpt_patches.runtime.processes import WorkerDied, mapped, started
print(mapped(lambda item: item, tests.ITEMS, 1))
with started([tests.killed, tests.paused]) as workers:
    try:
        workers[0].receive()
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
from ckpt_patches.runtime.processes import started
with started([lambda: [bytes(1 << 20)]] * 2) as workers:
    for worker in workers:
        worker._wait()
    print("full", flush=True)
    signal.pause()
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    assert parent.stdout.readline() == "full\n"
    parent.kill()
    parent.communicate(timeout=TIMEOUT)


def test_an_interrupt_is_not_the_workers() -> None:
    def told() -> Iterator[str]:
        yield "begun"
        time.sleep(0.1)
        yield "not interrupted"

    with started([told]) as (worker,):
        assert worker.receive() == "begun"
        os.kill(pid_of(worker), signal.SIGINT)
        assert worker.receive() == "not interrupted"


def pid_of(worker: Worker) -> int:
    return int(worker.name.split()[-1])


# Results in order


def test_results_come_in_the_order_of_the_items_and_workers_take_turns() -> None:
    found = list(in_order(lambda item: (item, os.getpid()), ITEMS, 3))
    assert [item for item, _ in found] == ITEMS
    assert len({pid for _, pid in found}) == 3
    assert os.getpid() not in {pid for _, pid in found}


def test_no_items_take_no_worker() -> None:
    assert list(in_order(str, [], 3)) == []


def test_results_after_the_first_error_are_not_waited_for() -> None:
    def fail(item: int) -> int:
        if item == 4:
            raise UserError("rank 4 is damaged")
        if item > 4:
            signal.pause()
        return item

    found = in_order(fail, ITEMS, 3)
    assert [next(found) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(UserError, match="rank 4 is damaged"):
        next(found)


def test_results_that_are_not_asked_for_any_more() -> None:
    found = in_order(lambda item: bytes(1 << 20), ITEMS, 2)
    assert next(found) == bytes(1 << 20)
    found.close()  # type: ignore[attr-defined]


def test_a_ctrl_c_that_does_not_interrupt_the_system_call_is_seen() -> None:
    """As if it came between Python's last look for signals and the call; the process then waited forever."""

    def interrupt() -> None:
        time.sleep(0.2)  # the main thread is in its system call by now
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)

    def receive(worker: Worker) -> None:
        thread.start()
        worker.receive()

    with started([partial(map, lambda _: signal.pause(), ITEMS)]) as (worker,):
        with pytest.raises(KeyboardInterrupt):
            receive(worker)
        thread.join()


# The converter's workers

WRITE = """
import os, sys
from ckpt_patches.convert import convert_command as command, write as writing

def write(writer, output):
    {}

writing.Writer.write = write
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


def test_ctrl_c_ends_the_conversion_in_one_line(tmp_path: Path) -> None:
    process = converting(tmp_path, STOPS)
    assert process.stdout
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all processes of the group
    _, err = process.communicate(timeout=TIMEOUT)  # returns when the last worker has closed its output
    assert (process.returncode, err) == (130, "ds_to_universal: interrupted; the same command goes on from here\n")


def test_a_killed_worker_ends_the_conversion_in_one_line(tmp_path: Path) -> None:
    process = converting(tmp_path, STOPS)
    assert process.stdout
    pid = int(process.stdout.readline())
    os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 2
    assert err == (
        f"ds_to_universal: worker process {pid} was killed (SIGKILL) before it was done; is there enough memory? "
        "Run the same command again\n"
    )
