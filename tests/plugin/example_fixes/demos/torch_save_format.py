"""torch_dist save"""

from pathlib import Path

import torch

from ckpt_patches.demo import megatron_training as mt
from ckpt_patches.demo import show


def save(rank: int, folder: Path) -> str:
    from megatron.core.dist_checkpointing import ShardedTensor

    mt.write({"t": ShardedTensor.from_rank_offsets("t", torch.arange(4.0))}, folder, "torch_dist")
    return ""


if __name__ == "__main__":
    show(lambda folder: str(mt.results(save, 1, folder / "checkpoint")[0]), "saved", raises="")
