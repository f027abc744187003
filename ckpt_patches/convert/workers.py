"""Write the outputs of a plan with several processes, each its share by bytes."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from ckpt_patches.convert.output_files import Output
from ckpt_patches.convert.source_files import Sources
from ckpt_patches.convert.write import Job, Writer
from ckpt_patches.runtime.processes import in_shares, largest_first

WORTH_A_PROCESS = 64 << 20  # bytes: starting one takes as long as to move these
COST_OF_A_FILE = 1 << 18  # bytes that could be moved in the time it takes to make a file


def shares(outputs: Sequence[Output], count: int) -> list[list[Output]]:
    """Divide outputs between workers. Every process of a group comes to the same result."""
    return largest_first(outputs, count, lambda output: (-output.nbytes, output.name), _cost)


def _cost(output: Output) -> int:
    return output.nbytes + COST_OF_A_FILE


def worker_count(outputs: Sequence[Output], most: int) -> int:
    """How many processes these outputs are worth."""
    nbytes = sum(map(_cost, outputs))
    return max(1, min(most, len(outputs), nbytes // WORTH_A_PROCESS))


def write_all(outputs: Sequence[Output], job: Job, count: int, show: Callable[[int], object], interval: float) -> None:
    """Write outputs by `count` processes; `show` is told every `interval` seconds how many bytes were moved till then.

    Raises:
        UserError: a worker could not do its share, or `show` raised it; the others are stopped.
        WorkerDefect: see `ckpt_patches.runtime.processes`.
    """
    job = replace(job, bytes_in_flight=job.bytes_in_flight // count)
    in_shares(partial(_work, os.getpid(), job), shares(outputs, count), show, interval)


def _work(parent: int, job: Job, share: Sequence[Output], moved: Callable[[int], None]) -> Iterator[None]:
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
