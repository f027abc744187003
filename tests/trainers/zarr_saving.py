"""CPU ranks and flattened shards for saves with the real megatron-core's zarr strategy."""

import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainers.ranks import free_port, wait_for
from trainers.ranks import results as run_ranks

PATIENCE = 0.3  # seconds, while a lock blocks the other ranks
FOREVER = 60.0  # seconds, where no lock blocks them


def results(worker: Callable[..., Any], ranks: int, *args: object) -> list[Any]:
    """The return values of `worker(rank, *args)`, one per rank.

    Raises:
        RankError: a rank raised an error.
    """
    import_packages()
    return run_ranks(_start, ranks, worker, ranks, str(free_port()), *args)


def import_packages() -> None:
    import megatron.core.dist_checkpointing.strategies.tensorstore
    import megatron.core.dist_checkpointing.strategies.zarr  # noqa: F401

    torch.set_num_threads(1)
    torch.cuda.synchronize = lambda *args, **kwargs: None


def _start(rank: int, worker: Callable[..., Any], ranks: int, port: str, *args: object) -> Any:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=600))
    result = worker(rank, *args)
    dist.barrier()
    dist.destroy_process_group()
    return result


def flattened_shard(
    key: str,
    rank: int,
    dp: int,
    tp: int,
    shape: tuple[int, int],
    dtype: torch.dtype = torch.float32,
) -> Any:
    """This rank's equal part of its tensor-parallel rank's shard, filled with rank + 1."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    rows, columns = shape
    tp_rank, dp_rank = divmod(rank, dp)
    numel = rows * columns // dp
    return ShardedTensor(
        key,
        torch.full((numel,), float(rank + 1), dtype=dtype),
        dtype,
        shape,
        (rows * tp, columns),
        (rows * tp_rank, 0),
        (tp, 1),
        replica_id=0,
        flattened_range=slice(dp_rank * numel, (dp_rank + 1) * numel),
    )


def force_race(rank: int, dp: int, signals: Path) -> None:
    """Interleave each array's writes: rank 0 reads chunk 0, the ranks that share it write, rank 0 writes back.

    If rank 0 holds the chunk's lock, it waits until all other ranks are about to request it, and then gives them
    PATIENCE seconds to write despite the lock.
    """
    import zarr

    write, read_chunk, array = zarr.Array.set_coordinate_selection, zarr.Array._process_for_setitem, [0]
    others = range(1, dp)

    def write_in_turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        if rank in others:
            wait_for([signals / f"read.{array[0]}"], FOREVER)
            (signals / f"asking.{array[0]}.{rank}").touch()
        result = write(self, *args, **kwargs)
        (signals / f"written.{array[0]}.{rank}").touch()
        array[0] += 1
        return result

    def read_and_wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        chunk = read_chunk(self, *args, **kwargs)
        (signals / f"read.{array[0]}").touch()
        wait_for([signals / f"asking.{array[0]}.{other}" for other in others], FOREVER)
        locked = self.synchronizer is not None
        wait_for([signals / f"written.{array[0]}.{other}" for other in others], PATIENCE if locked else FOREVER)
        return chunk

    zarr.Array.set_coordinate_selection = write_in_turn
    if rank == 0:
        zarr.Array._process_for_setitem = read_and_wait


def lost_slices(
    out: Path, keys: Iterable[str], ranks: int, dp: int, dtype: torch.dtype = torch.float32
) -> list[tuple[str, int]]:
    """Key and rank of every slice whose elements are not rank + 1. Reads the chunk files directly, without zarr."""
    lost = []
    for key in keys:
        for rank in range(ranks):
            tp_rank, dp_rank = divmod(rank, dp)
            data = (out / key / f"{tp_rank}.0").read_bytes()
            slices = torch.frombuffer(bytearray(data), dtype=dtype).chunk(dp)
            if bool((slices[dp_rank] != rank + 1).any()):
                lost.append((key, rank))
    return lost
