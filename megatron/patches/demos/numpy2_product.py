"""checkpoints under NumPy 2"""

from pathlib import Path

import torch

from ckpt_patches.demo import show

BESIDE = {"numpy": "2.2.6"}


def run(folder: Path) -> str:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    whole = (4, 3), (4, 3), (0, 0), (1, 1)
    shard = ShardedTensor(
        "weight", torch.zeros(6), torch.float32, *whole, flattened_range=slice(6, 12)
    )
    try:
        shard.global_coordinates()
    except AttributeError as error:
        return f"AttributeError: {error}".partition(". ")[0]
    return ""


if __name__ == "__main__":
    show(run, "the place of a shard is computed")
