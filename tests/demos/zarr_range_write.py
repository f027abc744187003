"""zarr saves with locks that have no effect

Eight ranks save ten times. Every rank gets the lock, as on a file system with host-local locks.
"""

import fcntl
import random
from pathlib import Path

import torch.distributed as dist

from trainers import show, zarr_saving

RANKS, SAVES = 8, 10
KEY = "optimizer.state.exp_avg.weight"


def run(folder: Path) -> str:
    lost = zarr_saving.results(save, RANKS, folder)[0]
    return f"{lost} of {RANKS * SAVES} slices lost, and no error" if lost else ""


def save(rank: int, folder: Path) -> int:
    from megatron.core.dist_checkpointing.strategies.zarr import ZarrSaveShardedStrategy

    fcntl.lockf = lambda *args, **kwargs: None
    random.seed(rank)
    zarr_saving.write_in_pieces()
    zarr_saving.pause_behind_reads()
    lost = 0
    for number in range(SAVES):
        out = folder / str(number)
        out.mkdir(exist_ok=True)
        dist.barrier()
        shard = zarr_saving.flattened_shard(KEY, rank, RANKS, 1, (16, 32))
        ZarrSaveShardedStrategy("zarr", 1).save({"weight": shard}, out)
        lost += len(zarr_saving.lost_slices(out, [KEY], RANKS, RANKS))
        dist.barrier()
    return lost


if __name__ == "__main__":
    show(run, f"all {RANKS * SAVES} slices saved")
