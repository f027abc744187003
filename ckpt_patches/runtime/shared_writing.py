"""Write the files of an unfinished folder, divided among ranks and the worker processes of each rank."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from ckpt_patches.runtime.distributed import Ranks
from ckpt_patches.runtime.processes import in_shares
from ckpt_patches.runtime.progress import Progress
from ckpt_patches.runtime.unfinished import File, UnfinishedFolder

COST_OF_A_FILE = 1 << 18  # bytes that can be moved in the time that it takes to create a file

Output = TypeVar("Output", bound=File)
Input = TypeVar("Input", bound=File, contravariant=True)
Result = TypeVar("Result")
Moved = Callable[[int], None]  # called with the number of bytes after each move


class Writer(Protocol[Input]):
    """Writes files of a folder; a file gets its final name at the latest in `finish`."""

    def write(self, file: Input, /) -> object: ...

    def finish(self) -> object: ...


@dataclass(frozen=True)
class Task(Generic[Output]):
    """The files to write, and how."""

    outputs: Sequence[Output]  # of all ranks
    # Called in a worker process, with the number of workers.
    writer: Callable[[int, Moved], AbstractContextManager[Writer[Output]]]
    workers: Callable[[Sequence[Output]], int]  # the number of processes that is efficient for some files
    to_move: Callable[[Sequence[Output]], int]  # bytes that will be reported as moved for some files


@dataclass(frozen=True)
class Written:
    """What one rank and its workers wrote."""

    bytes: int
    files: int
    files_before: int  # of an interrupted run
    workers: int
    results: Sequence[Any] = ()  # of the workers' `finish`


@dataclass(frozen=True)
class Done(Generic[Result]):
    """What was written: on rank 0 by all ranks, on other ranks by the own rank."""

    written: Written
    began: float  # when the first byte was moved, on time.monotonic's clock
    result: Result | None  # of `finish`, on rank 0


def write_together(
    folder: UnfinishedFolder, task: Task[Output], ranks: Ranks, finish: Callable[[Sequence[Written]], Result]
) -> Done[Result]:
    """Lock the folder, write the missing files, and call `finish` on rank 0, with what each rank wrote.

    All ranks call this.

    Raises:
        UserError: another process writes the folder, a file cannot be written, or a rank is missing.
        WorkerDefect: see `ckpt_patches.runtime.processes`.
    """
    with ExitStack() as stack:

        def take() -> None:
            folder.begin()
            stack.enter_context(folder.held())

        ranks.first("making the output folder", take)
        began = time.monotonic()
        written = ranks.gather("writing", lambda: _write_share(folder, task, ranks))
        result = ranks.first("finishing the output folder", lambda: finish(written))
    total = Written(
        bytes=sum(own.bytes for own in written),
        files=sum(own.files for own in written),
        files_before=sum(own.files_before for own in written),
        workers=sum(own.workers for own in written),
    )
    return Done(total, began, result)


def shares(files: Sequence[Output], count: int) -> list[list[Output]]:
    """Divide files: the largest first, each to the smallest share. Deterministic, so equal in every process."""
    divided: list[list[Output]] = [[] for _ in range(count)]
    loads = [0] * count
    for file in sorted(files, key=lambda file: (-file.nbytes, file.name)):
        least = loads.index(min(loads))
        divided[least].append(file)
        loads[least] += cost(file)
    return divided


def cost(file: File) -> int:
    return file.nbytes + COST_OF_A_FILE


def _write_share(folder: UnfinishedFolder, task: Task[Output], ranks: Ranks) -> Written:
    """Write the missing files of this rank's share."""
    own = shares(task.outputs, ranks.size)[ranks.rank]
    left = folder.missing(own)
    count = task.workers(left)
    results: list[Any] = []
    with Progress(task.to_move(left)) as progress:
        if left:
            work = partial(_work, os.getpid(), partial(task.writer, count))
            results = in_shares(work, shares(left, count), progress.show, Progress.INTERVAL)
    return Written(sum(file.nbytes for file in left), len(left), len(own) - len(left), count, results)


def _work(
    parent: int,
    begin: Callable[[Moved], AbstractContextManager[Writer[Output]]],
    share: Sequence[Output],
    moved: Moved,
) -> Iterator[Any]:
    with begin(moved) as writer:
        try:
            for file in share:
                if os.getppid() != parent:  # it was killed; nobody waits for this any more
                    break
                writer.write(file)
        finally:
            result = writer.finish()  # rename the complete files, even if the next one failed
    yield result
