"""save asynchronously without nvidia-resiliency-ext"""

import sys
from pathlib import Path

from ckpt_patches.demo import megatron_training as mt

ABSENT = "nvidia_resiliency_ext"


def save_and_load(rank: int, checkpoint: Path) -> str:
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy

    saved = torch.arange(10.0)
    checkpoint.mkdir()
    request = dist_checkpointing.save(
        mt.one_weight(saved), str(checkpoint), ("torch_dist", 1), async_sharded_save=True
    )
    calls = get_async_strategy()[1]["AsyncCallsQueue"](persistent=False)
    calls.schedule_async_request(request)
    calls.maybe_finalize_async_calls(blocking=True)
    calls.close()
    loaded = dist_checkpointing.load(mt.one_weight(torch.empty(10)), str(checkpoint))
    return "" if torch.equal(loaded["weight"], saved) else "other values than were saved"


if __name__ == "__main__":
    sys.modules[ABSENT] = None  # type: ignore[assignment]  # even if it is installed
    mt.show_result(save_and_load, 1, "saved, and loaded as saved", raises="ModuleNotFoundError")
