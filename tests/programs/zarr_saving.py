"""What the programs about the zarr strategy share: CPU ranks, and flattened shards to save."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def spawn(worker: Callable[..., None], ranks: int, *args: object) -> None:
    """Run `worker(rank, *args)` on that many processes with a Gloo group; forked, so packages are imported once."""
    import megatron.core.dist_checkpointing.strategies.tensorstore
    import megatron.core.dist_checkpointing.strategies.zarr  # noqa: F401

    torch.set_num_threads(1)
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.multiprocessing.start_processes(_start, (worker, ranks, *args), nprocs=ranks, start_method="fork")


def _start(rank: int, worker: Callable[..., None], ranks: int, *args: object) -> None:
    port = os.environ.get("MASTER_PORT", "29517")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    worker(rank, *args)
    dist.barrier()
    dist.destroy_process_group()


def flattened_shard(key: str, rank: int, dp: int, tp: int, shape: tuple[int, int], fill: float | None = None) -> Any:
    """This rank's even part of its tensor-parallel rank's fp32 shard, filled with rank + 1, or `fill`."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    rows, columns = shape
    tp_rank, dp_rank = divmod(rank, dp)
    numel = rows * columns // dp
    return ShardedTensor(
        key,
        torch.full((numel,), float(rank + 1) if fill is None else fill),
        torch.float32,
        shape,
        (rows * tp, columns),
        (rows * tp_rank, 0),
        (tp, 1),
        replica_id=0,
        flattened_range=slice(dp_rank * numel, (dp_rank + 1) * numel),
    )
