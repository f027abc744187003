"""Write the outputs of a plan with several processes, each its share by bytes."""

import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from mmap import mmap

from ckpt_patches.errors import UserError
from deepspeed_patches.ds_to_universal.outputs import Output
from deepspeed_patches.ds_to_universal.processes import Child, wait
from deepspeed_patches.ds_to_universal.sources import Sources
from deepspeed_patches.ds_to_universal.write import Job, Writer

WORTH_A_PROCESS = 64 << 20  # bytes: starting one takes as long as to move these
COST_OF_A_FILE = 1 << 18  # bytes that could be moved in the time it takes to make a file
COUNT = struct.Struct("<Q")


def shares(outputs: Sequence[Output], count: int) -> list[list[Output]]:
    """Divide outputs between workers: the largest first, each to whom has least.

    Every process of a group comes to the same result.
    """
    divided: list[list[Output]] = [[] for _ in range(count)]
    loads = [0] * count
    for output in sorted(outputs, key=lambda output: (-output.nbytes, output.name)):
        least = loads.index(min(loads))
        divided[least].append(output)
        loads[least] += output.nbytes + COST_OF_A_FILE
    return divided


class Workers:
    """The processes that write outputs; started at once, and waited for later."""

    def __init__(self, outputs: Sequence[Output], job: Job, count: int) -> None:
        nbytes = sum(output.nbytes + COST_OF_A_FILE for output in outputs)
        self.count = max(1, min(count, len(outputs), nbytes // WORTH_A_PROCESS))
        self._moved = mmap(-1, COUNT.size * self.count)  # shared: bytes by worker
        job = replace(job, bytes_in_flight=job.bytes_in_flight // self.count)
        self._running = [
            Child(partial(_work, os.getpid(), share, job, self._counter(index)))
            for index, share in enumerate(shares(outputs, self.count))
        ]

    def _counter(self, index: int) -> Callable[[int], None]:
        def moved(nbytes: int) -> None:
            (before,) = COUNT.unpack_from(self._moved, index * COUNT.size)
            COUNT.pack_into(self._moved, index * COUNT.size, before + nbytes)

        return moved

    @property
    def moved(self) -> int:
        """Bytes until now."""
        return sum(count for (count,) in COUNT.iter_unpack(self._moved[:]))

    def wait(self, show: Callable[[int], object], interval: float) -> None:
        """Until all are done.

        Raises:
            UserError: a worker could not do its share; the others are stopped.
        """
        try:
            left = list(self._running)
            while left:
                for child in wait(left, interval):
                    if child.receive():
                        left.remove(child)
                        _raise_error(child.answer())
                show(self.moved)
        finally:
            for child in self._running:
                child.stop()


def _raise_error(answer: bytes) -> None:
    if answer:
        raise UserError(answer.decode())


def _work(parent: int, share: Sequence[Output], job: Job, moved: Callable[[int], None]) -> bytes:
    """Write outputs; what went wrong, for the user."""
    try:
        with Sources(job.paths, job.access) as sources:
            writer = Writer(job, sources, moved)
            try:
                for output in share:
                    if os.getppid() != parent:  # killed; nobody waits for this any more
                        break
                    writer.write(output)
            finally:
                writer.finish()  # of those that are whole, also where the next one could not be written
    except UserError as error:
        return str(error).encode()
    except KeyboardInterrupt:
        return b"interrupted"
    return b""
