"""Forked worker processes, each of which sends its results through its own pipe.

`concurrent.futures` is not used: its workers outlive this process after a SIGKILL, because each holds the other end of
the queue from which it reads, and if a second fork fails, the interpreter waits at its exit for the first worker
forever. Here a pipe closes when either of its processes ends.

Workers ignore Ctrl-C: this process is interrupted, and stops them.
"""

import contextlib
import errno
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from ckpt_patches.errors import UserError, WorkerDefect

Item = TypeVar("Item")
Result = TypeVar("Result")
_MOMENT = 0.5  # seconds
_LIMITS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_DEVICES = ("/dev/nvidia", "/dev/dxg", "/dev/kfd")  # files that a context of CUDA or ROCm holds open
_forks: ContextVar[bool] = ContextVar("_forks", default=True)


class WorkerDied(UserError):
    """A worker ended without a result, for example killed by a user, or by the kernel for lack of memory."""


def in_order(function: Callable[[Item], Result], items: Sequence[Item], count: int) -> Iterator[Result]:
    """The function's results for the items, in their order, computed by `count` workers in turn.

    The results that a worker computes ahead are limited by its pipe (64 KiB).

    Raises:
        UserError, OSError: raised by the function; all workers are stopped.
        WorkerDefect: the function raised something else.
        WorkerDied: a worker has ended before it was done.
        UserError: the system does not allow so many processes.
    """
    if not _forks.get():
        yield from map(function, items)
        return
    count = min(count, len(items))
    with contextlib.ExitStack() as stack:
        interrupts = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # between a fork and its entry
        try:
            workers = [
                _started(stack, partial(map, function, items[number::count]), f"{number + 1} of {count}")
                for number in range(count)
            ]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, interrupts)
        for index in range(len(items)):
            yield _received(*workers[index % count])


def mapped(function: Callable[[Item], Result], items: Sequence[Item], worth_a_process: int) -> list[Result]:
    """The function's results, which must be picklable; for many items, computed by several processes.

    If one of them fails, all is computed again here, so that the error of the first item is raised as it is.
    """
    count = min(len(os.sched_getaffinity(0)), len(items) // worth_a_process)
    if count > 1 and _forks.get():
        with contextlib.suppress(UserError, OSError, WorkerDefect):
            return list(in_order(function, items, count))
    return list(map(function, items))


def _started(stack: contextlib.ExitStack, run: Callable[[], Iterable[Any]], number: str) -> tuple[Any, Connection]:
    """A worker, which the stack stops, and the end of the pipe that it sends to."""
    fork = get_context("fork")
    try:
        receiving, sending = fork.Pipe(duplex=False)
        stack.callback(receiving.close)
        with sending:
            process = fork.Process(target=_work, args=(run, receiving, sending))
            process.start()
    except OSError as error:
        if error.errno not in _LIMITS:  # of standard output, which a fork flushes
            raise
        raise UserError(
            f"cannot start worker process {number}: {error.strerror}; "
            "take fewer, or have more allowed (ulimit -u and ulimit -n, or the container's limits)"
        ) from None
    stack.callback(_stop, process)
    return process, receiving


def _stop(process: Any) -> None:
    process.kill()
    process.join()
    with contextlib.suppress(ValueError):  # SIGCHLD is ignored, and so nothing tells that it has ended
        process.close()


def _work(run: Callable[[], Iterable[Any]], receiving: Connection, sending: Connection) -> None:
    """The work of a worker. Each message is a result and None, or None and an error."""
    # If the worker kept this end of its pipe, it would wait forever after the other process is killed. Workers forked
    # later also hold this end, but none holds the end of the last worker: it ends first, then the rest.
    receiving.close()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # it ends without a word if nobody reads any more
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    gc.freeze()  # otherwise the collector touches every object, and so copies its memory
    try:
        for result in run():
            sending.send((result, None))
    except MemoryError:
        sending.send((None, UserError("there is not enough memory for a worker process")))
    except (UserError, OSError) as error:
        sending.send((None, error))
    except Exception:
        text = f"this is a defect, please report it with what follows:\n{traceback.format_exc().rstrip()}"
        sending.send((None, WorkerDefect(f"a worker process failed; {text}")))


def _received(process: Any, receiving: Connection) -> Any:
    """Wait for the next result of a worker."""
    try:
        # One wait without end would not see a Ctrl-C that comes just before it, or that another thread is given.
        while not receiving.poll(_MOMENT):
            pass
        result, error = receiving.recv()
    except (EOFError, OSError):
        process.join()
        code = process.exitcode  # None if SIGCHLD is ignored
        how = f"exited {code}" if code else "ended"
        how = f"was killed ({signal.Signals(-code).name})" if code and code < 0 else how
        raise WorkerDied(
            f"worker process {process.pid} {how} before it was done; is there enough memory? Run the same command again"
        ) from None
    if error is not None:
        raise error
    return result


def may_fork() -> bool:
    """Whether a fork of this process is safe: other threads may hold locks, and a device's context does not survive."""
    distributed = sys.modules.get("torch.distributed")
    has_group = distributed is not None and distributed.is_available() and distributed.is_initialized()
    is_alone = threading.active_count() == 1 and not current_process().daemon
    return is_alone and not has_group and not _has_device()


def _has_device() -> bool:
    """Whether this process uses a GPU, through torch or any other package."""
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
