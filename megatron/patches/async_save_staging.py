"""Keep what an asynchronous save writes as it was: hold the staged copy, copy shared tensors, miss a dead worker.

https://github.com/NVIDIA/Megatron-LM/issues/2288
"""

import ast
from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import AlreadyThere, Function, NoMatch, NotConcerned, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import multiprocessing
    import threading
    from typing import Any

    import torch

ASYNC_UTILS = "megatron.core.dist_checkpointing.strategies.async_utils"

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/NVIDIA/Megatron-LM/issues/2288",
        "https://github.com/NVIDIA/Megatron-LM/issues/6970",
        "https://github.com/NVIDIA/Megatron-LM/issues/6971",
    ),
    symptom="a save contains data of a later step or another tensor, or hangs",
    releases=(("0.12.0", newest("megatron-core")),),
    stacks="asynchronous saves; from 0.17.0 `--async-strategy mcore`",
    silent=True,
    stages=("async",),
    test="tests/unit_tests/dist_checkpointing/test_async_save_staging.py",
)


def _own_tensors(staged: object) -> object:
    """Staged write buckets in which no CPU tensor is the trainer's own memory.

    Tensors that are on the CPU already are not copied by staging, and reach the worker in shared
    memory.
    """
    if isinstance(staged, (list, tuple)) and type(staged) in (list, tuple):
        return type(staged)(map(_own_tensors, staged))
    if isinstance(staged, torch.Tensor) and staged.device.type == "cpu" and staged.is_shared():
        return staged.clone()
    return staged


class PersistentAsyncCaller:
    """The methods that upstream's class of this name gets."""

    if TYPE_CHECKING:
        process: multiprocessing.Process

    def _join_or_worker_ends(self, queue: "Any") -> None:
        """Wait until all that was put into a queue is done, or its worker has ended."""
        waiting = threading.Thread(target=queue.join, daemon=True)
        waiting.start()
        while waiting.is_alive() and self.process.is_alive():
            waiting.join(timeout=1)

    def _raise_as_worker_ended(self) -> None:
        """The checkpoint that it was to write is not whole, and no more will be written."""
        raise RuntimeError(
            "expected the process that writes checkpoints to finish its save, found it ended with"
            f" exit code {self.process.exitcode}: this checkpoint is not whole; look for what"
            " killed it"
        )


@fix.edit(ASYNC_UTILS, independent=True)
def hold_staged_tensors(source: Source) -> None:
    """A forked writer shares pinned memory with the trainer, which is handed out again once nobody holds it."""
    schedule = _method(source, "TemporalAsyncCaller.schedule_async_call")
    close = _method(source, "TemporalAsyncCaller.close")
    stage = "async_fn_args[1] = async_req.preload_fn()"
    if source.has("self.preloaded_holder = async_fn_args[1]", within=schedule):
        raise AlreadyThere  # since 0.17
    source.check_parts(
        {
            "the staged tensors are held": source.has(
                "self._staged = async_fn_args[1]", within=schedule
            ),
            "and let go": source.has("self._staged = None", within=close),
        }
    )
    source.insert_after(
        source.one(stage, within=schedule),
        "self._staged = async_fn_args[1]  # until the writer has ended",
    )
    source.insert_after(source.one("self.process = None", within=close), "self._staged = None")


@fix.edit(ASYNC_UTILS, independent=True)
def own_shared_tensors(source: Source) -> None:
    """The trainer waits while a persistent worker stages, and changes its tensors while they are written."""
    loop = _method(source, "PersistentAsyncCaller.async_loop")
    called = source.has("_own_tensors(item.preload_fn())", within=loop)
    source.check_parts({**source.functions_there("", _own_tensors), "it is called": called})
    stage = source.one("async_fn_args[1] = item.preload_fn()", within=loop)
    source.replace(stage.value, "_own_tensors(item.preload_fn())")
    source.insert_function_before(source.class_named("PersistentAsyncCaller"), _own_tensors)


@fix.edit(ASYNC_UTILS, independent=True)
def miss_a_dead_worker(source: Source) -> None:
    """Nobody finishes what a dead worker has begun; upstream waits for it for ever."""
    schedule, done, close = (
        _method(source, f"PersistentAsyncCaller.{name}")
        for name in ("schedule_async_call", "is_current_async_call_done", "close")
    )
    methods = (
        PersistentAsyncCaller._join_or_worker_ends,
        PersistentAsyncCaller._raise_as_worker_ended,
    )
    ended = "worker_ended = not self.process.is_alive()"
    source.check_parts(
        {
            **source.functions_there("PersistentAsyncCaller.", *methods),
            "import threading": source.imports("threading"),
            "staging": source.has("self._join_or_worker_ends(...)", within=schedule),
            "the worker's end is seen": source.has(ended, within=done),
            "and told": source.has(RAISE_IF_SEEN, within=done),
            "closing": source.has("self._join_or_worker_ends(...)", within=close),
        }
    )
    last = next(name for name in ("subprocess", "os", "logging") if source.imports(name))
    source.insert_after(source.one(f"import {last}"), "import threading")
    _wait_also_for_its_end(source, schedule, "preload_q", RAISE_IF_ENDED)
    _wait_also_for_its_end(source, close, "queue")
    tries = source.all_of(ast.Try, done)
    if len(tries) != 1:
        raise NoMatch(f"expected one `try` in {done.name}, found {len(tries)}")
    source.insert_before(tries[0], ended)
    source.insert_before(tries[0].handlers[0].body[0], RAISE_IF_SEEN)
    for method in methods:
        source.insert_method_before(schedule, method)


RAISE_IF_SEEN = """if worker_ended:
    self._raise_as_worker_ended()"""
RAISE_IF_ENDED = """if not self.process.is_alive():
    self._raise_as_worker_ended()"""


def _method(source: Source, name: str) -> Function:
    """Raises NotConcerned in a release that has no such caller: before 0.12."""
    if not source.has_function(name):
        raise NotConcerned
    return source.function(name)


def _wait_also_for_its_end(source: Source, function: Function, name: str, then: str = "") -> None:
    """In place of waiting for a queue, which is the instance's up to 0.16 and the class's since."""
    waits = [f"self.{name}.join()", f"self._persistent_{name}.join()"]
    found = [
        statement
        for statement in source.all_of(ast.Expr, function)
        if source.text(statement) in waits
    ]
    if len(found) != 1:
        raise NoMatch(
            f"expected {' or '.join(waits)} once in {function.name}, found it {len(found)} times"
        )
    queue = source.text(found[0]).removesuffix(".join()")
    source.replace(
        found[0], "\n".join([f"self._join_or_worker_ends({queue})", *([then] if then else [])])
    )
