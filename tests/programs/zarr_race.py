"""Save a zarr checkpoint with the real megatron-core while the creating rank sits inside its read-modify-write.

Rank 0 creates the arrays. Between reading chunk 0 and writing it back it waits until every other rank of that chunk has
written: what it read is stale by then, and what the others wrote is lost. Where it holds the chunk's lock, it waits
until all others are about to ask for it, and gives them PATIENCE seconds to write nevertheless. Prints JSON: the slices
lost, by key and rank, and what a listing of the checkpoint finds.

    zarr_race.py OUT [--ranks 4] [--tp 1] [--dtype float32]
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

KEYS = ("fp32_param", "exp_avg", "exp_avg_sq")
ROWS, COLUMNS = 24, 50  # of a tensor-parallel rank's shard
PATIENCE = 0.3  # seconds, where a lock holds the others for as long as it is held
FOREVER = 60.0  # seconds, where they come


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    # Forked, so that the packages are imported once.
    import megatron.core.dist_checkpointing.strategies.zarr  # noqa: F401

    torch.multiprocessing.start_processes(worker, (options,), nprocs=options.ranks, start_method="fork")


def worker(rank: int, options: argparse.Namespace) -> None:
    port = os.environ.get("MASTER_PORT", "29517")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(options.ranks))
    torch.cuda.synchronize = lambda *a, **k: None
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    from megatron.core.dist_checkpointing.strategies import zarr as strategy

    out = Path(options.out)
    dp = options.ranks // options.tp
    state = {key: shard(key, rank, dp, options) for key in KEYS}
    force_race(rank, dp, out.parent)
    dist.barrier()
    strategy.ZarrSaveShardedStrategy("zarr", 1).save(state, out)
    dist.barrier()
    if rank == 0:
        try:
            listed: object = sorted(strategy.ZarrLoadShardedStrategy().load_tensors_metadata(out))
        except ValueError as error:  # a lock file read as an array's metadata
            listed = f"{type(error).__name__}: {error}"
        print(json.dumps({"lost": lost_slices(out, dp, options), "listed": listed}))
    dist.barrier()
    dist.destroy_process_group()


def shard(key: str, rank: int, dp: int, options: argparse.Namespace) -> Any:
    """This rank's flattened range of its tensor-parallel shard, filled with rank + 1."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    tp_rank, dp_rank = divmod(rank, dp)
    per_rank = ROWS * COLUMNS // dp
    dtype = getattr(torch, options.dtype)
    return ShardedTensor(
        f"optimizer.state.{key}.w",
        torch.full((per_rank,), float(rank + 1), dtype=dtype),
        dtype,
        (ROWS, COLUMNS),
        (ROWS * options.tp, COLUMNS),
        (ROWS * tp_rank, 0),
        (options.tp, 1),
        replica_id=0,
        flattened_range=slice(dp_rank * per_rank, (dp_rank + 1) * per_rank),
    )


def force_race(rank: int, dp: int, signals: Path) -> None:
    """Interleave each array's writes: rank 0 reads chunk 0, the ranks that share it write, rank 0 writes back."""
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


def wait_for(files: list[Path], seconds: float) -> None:
    deadline = time.time() + seconds
    while time.time() < deadline and not all(file.exists() for file in files):
        time.sleep(0.01)


def lost_slices(out: Path, dp: int, options: argparse.Namespace) -> list[tuple[str, int]]:
    """Key and rank of every slice whose elements are not the rank's; reads the chunk files, past zarr."""
    lost = []
    for key in KEYS:
        for rank in range(options.ranks):
            tp_rank, dp_rank = divmod(rank, dp)
            data = (out / f"optimizer.state.{key}.w" / f"{tp_rank}.0").read_bytes()
            chunk = torch.frombuffer(bytearray(data), dtype=getattr(torch, options.dtype)).float().numpy()
            if not np.array_equal(np.split(chunk, dp)[dp_rank], np.full(len(chunk) // dp, rank + 1, np.float32)):
                lost.append((key, rank))
    return lost


if __name__ == "__main__":
    main()
