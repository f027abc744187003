"""save asynchronously without nvidia-resiliency-ext"""

import sys
from pathlib import Path
from typing import Any

from ckpt_patches.demo import megatron_training as mt
from ckpt_patches.demo import show

ABSENT = "nvidia_resiliency_ext"


def run(folder: Path) -> str:
    sys.modules[ABSENT] = None  # type: ignore[assignment]  # even if it is installed
    found: str = mt.results(save_and_load, 1, folder / "checkpoint")[0]
    return found


def save_and_load(rank: int, checkpoint: Path) -> str:
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy

    def state(tensor: torch.Tensor) -> dict[str, Any]:
        return {"weight": ShardedTensor.from_rank_offsets("weight", tensor)}

    saved = torch.arange(10.0)
    checkpoint.mkdir()
    request = dist_checkpointing.save(
        state(saved), str(checkpoint), ("torch_dist", 1), async_sharded_save=True
    )
    calls = get_async_strategy()[1]["AsyncCallsQueue"](persistent=False)
    calls.schedule_async_request(request)
    calls.maybe_finalize_async_calls(blocking=True)
    calls.close()
    loaded = dist_checkpointing.load(state(torch.empty(10)), str(checkpoint))
    return "" if torch.equal(loaded["weight"], saved) else "other values than were saved"


if __name__ == "__main__":
    show(run, "saved, and loaded as saved", raises="ModuleNotFoundError")
