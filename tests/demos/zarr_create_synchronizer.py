"""zarr save, 4 ranks

Rank 0 creates the arrays while the others write, in a fixed order of reads and writes.
"""

from pathlib import Path

import torch.distributed as dist

from trainers import show, zarr_saving

RANKS = 4
KEYS = [f"optimizer.state.{state}.weight" for state in ("fp32_param", "exp_avg", "exp_avg_sq")]


def run(folder: Path) -> str:
    (folder / "checkpoint").mkdir()
    lost = zarr_saving.results(save, RANKS, folder)[0]
    return f"{lost} of {RANKS * len(KEYS)} slices lost, and no error" if lost else ""


def save(rank: int, folder: Path) -> int:
    from megatron.core.dist_checkpointing.strategies.zarr import ZarrSaveShardedStrategy

    state = {key: zarr_saving.flattened_shard(key, rank, RANKS, 1, (24, 50)) for key in KEYS}
    zarr_saving.force_race(rank, RANKS, folder)
    dist.barrier()
    ZarrSaveShardedStrategy("zarr", 1).save(state, folder / "checkpoint")
    dist.barrier()
    return len(zarr_saving.lost_slices(folder / "checkpoint", KEYS, RANKS, RANKS))


if __name__ == "__main__":
    show(run, f"all {RANKS * len(KEYS)} slices saved")
