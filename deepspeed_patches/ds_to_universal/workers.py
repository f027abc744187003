"""Write the outputs of a plan with several processes, each its share by bytes."""

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from mmap import mmap

from ckpt_patches.processes import ready, started
from deepspeed_patches.ds_to_universal.output_files import Output
from deepspeed_patches.ds_to_universal.source_files import Sources
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


def worker_count(outputs: Sequence[Output], most: int) -> int:
    """How many processes these outputs are worth."""
    nbytes = sum(output.nbytes + COST_OF_A_FILE for output in outputs)
    return max(1, min(most, len(outputs), nbytes // WORTH_A_PROCESS))


def write_all(outputs: Sequence[Output], job: Job, count: int, show: Callable[[int], object], interval: float) -> None:
    """Write outputs by `count` processes; `show` is told every `interval` seconds how many bytes were moved till then.

    Raises:
        UserError: a worker could not do its share, or `show` raised it; the others are stopped.
        WorkerDefect: see `ckpt_patches.processes`.
    """
    moved = Counters(count)
    job = replace(job, bytes_in_flight=job.bytes_in_flight // count)
    divided = enumerate(shares(outputs, count))
    with started(
        [partial(_work, os.getpid(), share, job, moved.counter(index)) for index, share in divided]
    ) as running:
        left = list(running)
        while left:
            for worker in ready(left, interval):
                left.remove(worker)
                worker.receive()
            show(moved.total)


class Counters:
    """Bytes by worker, in memory that all of them share."""

    def __init__(self, count: int) -> None:
        self._bytes = mmap(-1, COUNT.size * count)

    def counter(self, index: int) -> Callable[[int], None]:
        """What a worker calls with bytes that it has moved."""

        def add(nbytes: int) -> None:
            (before,) = COUNT.unpack_from(self._bytes, index * COUNT.size)
            COUNT.pack_into(self._bytes, index * COUNT.size, before + nbytes)

        return add

    @property
    def total(self) -> int:
        """Until now."""
        return sum(count for (count,) in COUNT.iter_unpack(self._bytes[:]))


def _work(parent: int, share: Sequence[Output], job: Job, moved: Callable[[int], None]) -> Iterator[None]:
    """Write outputs."""
    with Sources(job.paths, job.access) as sources:
        writer = Writer(job, sources, moved)
        try:
            for output in share:
                if os.getppid() != parent:  # killed; nobody waits for this any more
                    break
                writer.write(output)
        finally:
            writer.finish()  # of those that are whole, also where the next one could not be written
    yield None
