"""save and load torch_dist with a current torch"""

from pathlib import Path
from typing import Any

import torch

from ckpt_patches.demo import megatron_training as mt
from ckpt_patches.demo import show


def run(folder: Path) -> str:
    found: str = mt.results(save_and_load, 1, folder / "checkpoint")[0]
    return found


def save_and_load(rank: int, checkpoint: Path) -> str:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    def state(tensor: torch.Tensor) -> dict[str, Any]:
        return {"weight": ShardedTensor.from_rank_offsets("weight", tensor), "iteration": 5}

    saved = torch.arange(10.0)
    checkpoint.mkdir()
    dist_checkpointing.save(state(saved), str(checkpoint), ("torch_dist", 1))
    loaded = dist_checkpointing.load(state(torch.empty(10)), str(checkpoint))
    return "" if torch.equal(loaded["weight"], saved) else "other values than were saved"


# Up to 0.8 the worker's error is only logged.
FAILURES = (
    "RuntimeError: Worker failure: _write_item()",
    "RuntimeError: Incomplete worker results",
)


if __name__ == "__main__":
    show(run, "saved, and loaded as saved", raises=FAILURES)
