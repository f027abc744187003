"""step while an asynchronous save writes"""

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainers import megatron_training as mt
from trainers.ranks import call_after

NUMEL = 5000


def save_and_step(rank: int, checkpoint: Path) -> str:
    """Save a CPU tensor that a persistent worker writes only after the next step."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    tensor, stepped = torch.zeros(NUMEL), checkpoint.with_suffix(".stepped")
    checkpoint.mkdir()
    options: dict[str, Any] = {"async_sharded_save": True}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:  # since 0.17
        options["async_strategy"] = "mcore"
    request = dist_checkpointing.save(mt.one_weight(tensor), str(checkpoint), ("torch_dist", 1), **options)
    calls = AsyncCallsQueue(persistent=True)
    calls.schedule_async_request(request._replace(async_fn=partial(call_after, stepped, request.async_fn)))
    tensor.add_(1)
    stepped.touch()
    calls.maybe_finalize_async_calls(blocking=True)
    calls.close()
    loaded = dist_checkpointing.load(mt.one_weight(torch.empty(NUMEL)), str(checkpoint))
    wrong = int(loaded["weight"].sum())
    return f"{wrong} of {NUMEL} elements are those of the next step, and no error" if wrong else ""


if __name__ == "__main__":
    mt.show_result(save_and_step, 1, f"all {NUMEL} elements are those of the save")
