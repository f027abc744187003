"""Forked processes: they have all that this one has, torch is not among it, and each sends back one answer.

`multiprocessing` does the same, and importing it takes longer than reading a hundred headers.
"""

import gc
import itertools
import os
import pickle
import select
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from ckpt_patches.errors import UserError

PIPE = 1 << 16  # bytes read at once

Item = TypeVar("Item")
Result = TypeVar("Result")


class Child:
    """A process that runs a function and sends back what it returns."""

    def __init__(self, run: Callable[[], bytes]) -> None:
        self.receiving, sending = os.pipe()
        self._received = bytearray()
        self._status: int | None = None
        self._pid = os.fork()
        if not self._pid:
            # It would itself be a reader of what it sends, and wait for ever if the other process were killed. The next
            # children are readers as well, but the last has none, and so they all end.
            os.close(self.receiving)
            _run(run, sending)
        os.close(sending)

    def receive(self) -> bool:
        """Take in what has been sent; whether that was all."""
        data = os.read(self.receiving, PIPE)
        self._received += data
        return not data

    def answer(self) -> bytes:
        """What the function returned.

        Raises:
            UserError: the process has died.
        """
        while not self.receive():
            pass
        self._join()
        if self._status:
            raise UserError(
                f"a worker ended with status {self._status}; run the same command again to go on from there"
            )
        return bytes(self._received)

    def stop(self) -> None:
        """Kill it if it still runs: what it has written by then has no name yet."""
        if self._status is None:
            os.kill(self._pid, signal.SIGKILL)
            self._join()

    def _join(self) -> None:
        _, status = os.waitpid(self._pid, 0)
        self._status = os.waitstatus_to_exitcode(status)
        os.close(self.receiving)


def _run(run: Callable[[], bytes], sending: int) -> None:
    """In the new process, which ends here: nothing of the other one's is to be cleaned up or written out twice."""
    status = 1
    try:
        gc.freeze()  # otherwise the collector touches every object there is, and so copies the memory it lies in
        answer = memoryview(run())
        while answer:
            answer = answer[os.write(sending, answer) :]
        status = 0
    finally:
        os._exit(status)


def wait(children: Sequence[Child], seconds: float) -> list[Child]:
    """Those that have something to receive, or have ended; none after some time."""
    by_descriptor = {child.receiving: child for child in children}
    poll = select.poll()
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in poll.poll(seconds * 1000)]


def mapped(function: Callable[[Item], Result], items: Sequence[Item], worth_a_process: int) -> list[Result]:
    """The function's results, which can be pickled; of many items, other processors do their shares.

    What one of them fails at is done here once more, so that errors come from here, those of the first items first.
    """
    count = max(1, min(len(os.sched_getaffinity(0)), len(items) // worth_a_process))
    ends = [len(items) * index // count for index in range(count + 1)]
    shares = [items[begin:end] for begin, end in itertools.pairwise(ends)]
    children = [Child(partial(_pickled, function, share)) for share in shares[1:]]
    try:
        found = list(map(function, shares[0]))
        for child, share in zip(children, shares[1:], strict=True):
            found += _results(child) or map(function, share)
        return found
    finally:
        for child in children:
            child.stop()


def _pickled(function: Callable[[Any], Any], share: Sequence[Any]) -> bytes:
    try:
        return pickle.dumps([function(item) for item in share], protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:  # it is raised again where it is done once more
        return pickle.dumps([])


def _results(child: Child) -> list[Any]:
    try:
        found: list[Any] = pickle.loads(child.answer())
    except UserError:
        return []
    return found
