"""Forked worker processes, each of which sends its results through its own pipe.

`concurrent.futures` is not used, for three reasons:

- Importing it and starting eight workers takes 0.23 s, this 0.09 s (medians of 15 on two busy cores; minima 0.15 s and
  0.08 s). The conversion of a checkpoint of 768 ranks takes 1.1 s.
- Its workers outlive this process after a SIGKILL, because each holds the other end of the queue from which it reads.
  Here a pipe closes when either of its processes ends (`test_no_process_outlives_one_that_is_killed`).
- If a second fork fails, the interpreter waits at its exit for the first worker forever
  (`test_where_no_second_process_can_be_made_the_first_is_stopped`).

Workers ignore Ctrl-C: this process is interrupted, and stops them.
"""

import contextlib
import gc
import os
import pickle
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from ckpt_patches.errors import UserError, WorkerDefect

Item = TypeVar("Item")
Result = TypeVar("Result")
_VALUE, _ERROR, _DEFECT = range(3)  # kinds of a worker's messages
_SIZE = 8  # bytes, before each message
_MOMENT = 500  # milliseconds
_DEVICES = ("/dev/nvidia", "/dev/dxg", "/dev/kfd")  # files that a context of CUDA or ROCm holds open
_forks: ContextVar[bool] = ContextVar("_forks", default=True)


class WorkerDied(UserError):
    """A worker ended without a result, for example killed by a user, or by the kernel for lack of memory."""


class Worker:
    """A process that runs a function, and sends each value that it yields."""

    def __init__(self, run: Callable[[], Iterable[Any]]) -> None:
        receiving, sending = os.pipe()
        try:
            self._pid = os.fork()
        except OSError:
            os.close(receiving)
            os.close(sending)
            raise
        if not self._pid:
            # If the worker kept this end of its pipe, it would wait forever after the other process is killed. Workers
            # forked later also hold this end, but none holds the end of the last worker: it ends first, then the rest.
            os.close(receiving)
            _run(run, sending)
        os.close(sending)
        self._receiving = receiving
        self._joined = False
        self._status: int | None = None  # as in `subprocess`; 0 if unknown
        self.name = f"worker process {self._pid}"

    def receive(self) -> Any:
        """Wait for the next value that the function yields.

        Raises:
            UserError, OSError: raised by the function.
            WorkerDefect: the function raised something else.
            WorkerDied: the process has ended before it yielded a value.
        """
        kind, value = pickle.loads(self._read(int.from_bytes(self._read(_SIZE), "little")))
        if kind == _DEFECT:
            raise WorkerDefect(
                f"a worker process failed; this is a defect, please report it with what follows:\n{value.rstrip()}"
            )
        if kind == _ERROR:
            raise value
        return value

    def _read(self, nbytes: int) -> bytes:
        """Raises: WorkerDied."""
        found = bytearray()
        while len(found) < nbytes:
            self._wait()
            part = os.read(self._receiving, nbytes - len(found))
            if not part:
                raise WorkerDied(self._how_it_died())
            found += part
        return bytes(found)

    def _wait(self) -> None:
        """Wait until there is something to read, or the worker has ended.

        The wait is interrupted now and then: one without end does not see a Ctrl-C that comes just before it begins, or
        that the system delivers to another thread.
        """
        poll = select.poll()
        poll.register(self._receiving, select.POLLIN)
        while not poll.poll(_MOMENT):
            pass

    def stop(self) -> None:
        """Kill the worker if it still runs, and wait until it has ended."""
        if not self._joined and not self._has_ended():
            os.kill(self._pid, signal.SIGKILL)
        self._join()

    def _has_ended(self) -> bool:
        """Whether its end of the pipe is closed. If SIGCHLD is ignored, its process id may be another's by now."""
        poll = select.poll()
        poll.register(self._receiving, 0)
        return any(event & select.POLLHUP for _, event in poll.poll(0))

    def _how_it_died(self) -> str:
        self._join()
        how = "ended"
        if self._status:
            how = f"was killed ({signal.Signals(-self._status).name})" if self._status < 0 else f"exited {self._status}"
        return f"{self.name} {how} before it was done; is there enough memory? Run the same command again"

    def _join(self) -> None:
        if self._joined:
            return
        self._status = 0
        with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored: its exit status is unknown
            _, status = os.waitpid(self._pid, 0)
            self._status = os.waitstatus_to_exitcode(status)
        os.close(self._receiving)
        self._joined = True


def _run(run: Callable[[], Iterable[Any]], sending: int) -> None:
    """Run in the new process, which ends here: it must not repeat the other process's cleanup and writes."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        gc.freeze()  # otherwise the collector touches every object, and so copies its memory
        for message in _messages(run):
            left = memoryview(len(message).to_bytes(_SIZE, "little") + message)
            while left:
                left = left[os.write(sending, left) :]
        status = 0
    except BrokenPipeError:  # nobody reads it any more
        pass
    finally:
        os._exit(status)


def _messages(run: Callable[[], Iterable[Any]]) -> Iterator[bytes]:
    try:
        for value in run():
            yield pickle.dumps((_VALUE, value), pickle.HIGHEST_PROTOCOL)
    except MemoryError:
        yield pickle.dumps((_ERROR, UserError("there is not enough memory for a worker process")))
    except (UserError, OSError) as error:
        yield pickle.dumps((_ERROR, error))
    except Exception:
        yield pickle.dumps((_DEFECT, traceback.format_exc()))


@contextlib.contextmanager
def started(functions: Sequence[Callable[[], Iterable[Any]]]) -> Iterator[list[Worker]]:
    """Start a worker for each function; all are stopped at the end of the block.

    Raises:
        UserError: the system does not allow so many processes; those that were started are stopped.
    """
    workers: list[Worker] = []
    try:
        with _no_interrupt():  # between a fork and its entry in the list
            for function in functions:
                workers.append(_forked(function, f"{len(workers) + 1} of {len(functions)}"))
        yield workers
    finally:
        for worker in workers:
            worker.stop()


def _forked(function: Callable[[], Iterable[Any]], number: str) -> Worker:
    try:
        return Worker(function)
    except OSError as error:
        raise UserError(
            f"cannot start worker process {number}: {error.strerror}; "
            "take fewer, or have more allowed (ulimit -u and ulimit -n, or the container's limits)"
        ) from None


def may_fork() -> bool:
    """Whether a fork of this process is safe: other threads may hold locks, and a device's context does not survive."""
    torch_distributed = sys.modules.get("torch.distributed")
    has_group = (
        torch_distributed is not None and torch_distributed.is_available() and torch_distributed.is_initialized()
    )
    return threading.active_count() == 1 and not has_group and not _has_device()


def _has_device() -> bool:
    """Whether this process uses a GPU, through torch or any other package."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own file is closed by now
            if os.readlink(entry.path).startswith(_DEVICES):
                return True
    return False


@contextlib.contextmanager
def safe_workers(wanted: int | None) -> Iterator[int]:
    """Within the block, the number of worker processes; None: as many as processors.

    1 if this process must not be forked. It does the work of that one itself.
    """
    from ckpt_patches.runtime.distributed import Ranks

    is_allowed = may_fork()
    before = _forks.set(is_allowed)
    try:
        yield wanted or Ranks().workers if is_allowed else 1
    finally:
        _forks.reset(before)


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def in_order(function: Callable[[Item], Result], items: Sequence[Item], count: int) -> Iterator[Result]:
    """The function's results for the items, in their order, computed by `count` workers in turn.

    The results that a worker computes ahead are limited by its pipe (64 KiB).

    Raises:
        UserError, OSError, WorkerDefect, WorkerDied: see `Worker.receive`; all workers are stopped.
    """
    if not _forks.get():
        yield from map(function, items)
        return
    turns = [partial(map, function, items[index::count]) for index in range(min(count, len(items)))]
    with started(turns) as workers:
        for index in range(len(items)):
            yield workers[index % len(workers)].receive()


def mapped(function: Callable[[Item], Result], items: Sequence[Item], worth_a_process: int) -> list[Result]:
    """The function's results, which must be picklable; for many items, computed by several processes.

    If one of them fails, all is computed again here, so that the error of the first item is raised as it is.
    """
    count = min(len(os.sched_getaffinity(0)), len(items) // worth_a_process)
    if count > 1 and _forks.get():
        with contextlib.suppress(UserError, OSError, WorkerDefect):
            return list(in_order(function, items, count))
    return list(map(function, items))
