"""Raise on all ranks when the process that writes an asynchronous save has died.

https://github.com/NVIDIA/Megatron-LM/issues/6970
"""

import ast
from collections.abc import Callable

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Function, NoMatch, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import multiprocessing
    import threading
    from typing import Any

    import torch

fix = Fix(
    __name__,
    upstream=("https://github.com/NVIDIA/Megatron-LM/issues/6970",),
    symptom="training hangs, or a part of a file is called saved, after its writer died",
    releases=(("0.4.1", newest("nvidia-resiliency-ext")),),
    stacks="asynchronous saves; a forked worker of `TorchAsyncCheckpoint`",
    silent=True,
    test="tests/checkpointing/unit/test_nvrx_dead_worker.py",
)


class AsyncCaller:
    """The methods added to upstream's class of this name."""

    if TYPE_CHECKING:
        process: multiprocessing.Process | None

    def _worker_ended(self, no_dist: bool) -> int:
        """The value that this rank adds to the count of active writers, so that all ranks raise.

        It exceeds the number of all active writers.
        """
        if no_dist:
            self._raise_as_worker_ended()
        ranks: int = torch.distributed.get_world_size()
        return ranks + 1

    def _raise_as_worker_ended(self) -> None:
        """Raise RuntimeError: this checkpoint is incomplete, and no more will be written."""
        code = None if self.process is None else self.process.exitcode
        found = f"it ended with exit code {code}" if code else "that of a rank ended"
        raise RuntimeError(
            f"expected the process that writes checkpoints to finish its save, found {found}:"
            " this checkpoint is incomplete; look for what killed it"
        )


class PersistentAsyncCaller:
    """The method added to upstream's class of this name."""

    if TYPE_CHECKING:
        process: multiprocessing.Process

    def _join_or_worker_ends(self, queue: "Any") -> None:
        """Wait until all items of a queue are done, or its worker has ended."""
        waiting = threading.Thread(target=queue.join, daemon=True)
        waiting.start()
        while waiting.is_alive() and self.process.is_alive():
            waiting.join(timeout=1)


ENDED = "worker_ended = not self.process.is_alive()  # before its last answer is read"
COUNT_IN = """if worker_ended:
    is_alive = self._worker_ended(no_dist)
    break"""
COUNT_IN_FORKED = """if self.process is not None and self.process.exitcode:
    is_alive = self._worker_ended(no_dist)"""
WAIT_FIRST = """if blocking and self.process is not None:
    self.process.join()"""
RAISE_TOGETHER = """active = int(ten)
if not 0 <= active <= torch.distributed.get_world_size():
    self._raise_as_worker_ended()
return active == 0"""


@fix.edit("nvidia_resiliency_ext.checkpointing.async_ckpt.core")
def watch_the_worker(source: Source) -> None:
    """A dead worker never finishes its save: upstream waits forever, or treats the save as complete."""
    schedule, done, close = (
        source.function(f"PersistentAsyncCaller.{name}")
        for name in ("schedule_async_call", "is_current_async_call_done", "close")
    )
    forked, together = (
        source.function(name)
        for name in (
            "TemporalAsyncCaller.is_current_async_call_done",
            "AsyncCaller.sync_all_async_calls",
        )
    )
    of_all: tuple[Callable[..., object], ...] = (
        AsyncCaller._worker_ended,
        AsyncCaller._raise_as_worker_ended,
    )
    source.skip_if(
        ("self._join_or_worker_ends(...)", schedule),
        ("self._join_or_worker_ends(...)", close),
        ("worker_ended = ...", done),
        ("self._worker_ended(no_dist)", done),
        "self.process.join()",
        "self._worker_ended(no_dist)",
        ("self._raise_as_worker_ended()", together),
        *of_all,
        PersistentAsyncCaller._join_or_worker_ends,
        source.imports("threading"),
        within=forked,
    )
    last = next(name for name in ("subprocess", "shutil", "os", "logging") if source.imports(name))
    source.insert_after(source.one(f"import {last}"), "import threading")
    for function, queue in ((schedule, "preload_q"), (close, "queue")):
        joined = _joined(source, function, queue)
        source.replace(
            joined, f"self._join_or_worker_ends({source.text(joined).removesuffix('.join()')})"
        )
    tries = source.all_of(ast.Try, done)
    if len(tries) != 1:
        raise NoMatch(f"expected one `try` in {done.name}, found {len(tries)}")
    source.insert_before(tries[0], ENDED)
    source.insert_before(tries[0].handlers[0].body[0], COUNT_IN)
    count = source.one("is_alive = ...", within=forked)
    source.insert_before(count, WAIT_FIRST)
    source.insert_after(count, COUNT_IN_FORKED)
    source.replace(source.one("return ten[0] == 0", within=together), RAISE_TOGETHER)
    for method in of_all:
        source.insert_method_before(together, method)
    source.insert_method_before(schedule, PersistentAsyncCaller._join_or_worker_ends)


def _joined(source: Source, function: Function, queue: str) -> ast.Expr:
    """The statement that waits for a queue, an attribute of the instance up to Megatron 0.16, and then of the class."""
    waits = [f"self.{queue}.join()", f"self._persistent_{queue}.join()"]
    found = [one for one in source.all_of(ast.Expr, function) if source.text(one) in waits]
    if len(found) != 1:
        raise NoMatch(
            f"expected {' or '.join(waits)} once in {function.name}, found it {len(found)} times"
        )
    return found[0]
