"""Asynchronous saves with the real megatron-core, while a training continues."""

import gc
import inspect
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainers.ranks import call_after

NUMEL = 5000


def ignore(*arguments: Any) -> None:
    """A writer that writes nothing."""


class Staged(list[torch.Tensor]):
    """A list that supports weak references."""


def held(rank: int, out: Path) -> dict[str, bool]:
    """Whether a forked writer's staged tensors are kept alive while it writes, and after."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest

    watched = []

    def stage() -> Staged:
        staged = Staged([torch.ones(NUMEL)])
        watched.append(weakref.ref(staged))
        return staged

    calls, sign = AsyncCallsQueue(), out.with_suffix(".go")
    calls.schedule_async_request(AsyncRequest(partial(call_after, sign, ignore), (0, None, 0), [], preload_fn=stage))
    gc.collect()
    while_writing = watched[0]() is not None
    sign.touch()
    calls.maybe_finalize_async_calls(blocking=True)
    gc.collect()
    return {"while writing": while_writing, "after": watched[0]() is not None}


def request(tensor: torch.Tensor, out: Path) -> Any:
    """A request staged as Megatron's writer does it, and written by `write`."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    buckets: list[Any] = [(str(out), "0", ([], [("item", tensor)]))]
    stage = partial(FileSystemWriterAsync.preload_tensors, buckets, True)
    return AsyncRequest(write, (str(out), buckets, 0), [], preload_fn=stage)


def write(out: str, buckets: Any, _: int) -> None:
    ((_, _, (_, ((_, tensor),))),) = buckets
    torch.save(tensor, out)


KEPT: list[Any] = []


def persistent_calls() -> Any:
    """A queue kept until the process ends: up to 0.16 freeing it also waits for the worker."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    KEPT.append(AsyncCallsQueue(persistent=True))
    return KEPT[-1]


def schedule(asked: Any, sign: Path) -> Any:
    """Schedule a save on a persistent worker, which waits for `sign` before it writes."""
    calls = persistent_calls()
    calls.schedule_async_request(asked._replace(async_fn=partial(call_after, sign, asked.async_fn)))
    return calls


def stepped(rank: int, out: Path) -> int:
    """The elements of the next step in what a persistent worker saves of a CPU tensor that the step changes."""
    tensor, sign = torch.zeros(NUMEL), out.with_suffix(".go")
    calls = schedule(request(tensor, out), sign)
    tensor.add_(1)
    sign.touch()
    calls.maybe_finalize_async_calls(blocking=True)
    calls.close()
    return int(torch.load(out).sum())


def checkpoint(tensor: torch.Tensor) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return {"w": ShardedTensor.from_rank_offsets("w", tensor)}


def save(rank: int, out: Path) -> None:
    """Save in torch_dist by a persistent worker."""
    from megatron.core import dist_checkpointing

    out.mkdir()
    state = checkpoint(torch.arange(float(NUMEL)))
    options: dict[str, Any] = {"async_sharded_save": True}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:  # since 0.17 not the default
        options["async_strategy"] = "mcore"
    asked = dist_checkpointing.save(state, str(out), ("torch_dist", 1), **options)
    calls = persistent_calls()
    calls.schedule_async_request(asked)
    calls.maybe_finalize_async_calls(blocking=True)
    calls.close()


def load(rank: int, out: Path) -> bool:
    """Whether that loads as it was saved."""
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load(checkpoint(torch.zeros(NUMEL)), str(out))
    return bool(torch.equal(loaded["w"], torch.arange(float(NUMEL))))
