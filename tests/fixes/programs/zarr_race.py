"""Save a zarr checkpoint with the real megatron-core while the creating rank is inside its read-modify-write.

Rank 0 creates the arrays. Between reading chunk 0 and writing it back, it waits until every other rank of that chunk
has written: its data is stale then, and the others' writes are lost. If it holds the chunk's lock, it waits until all
others are about to request it, and gives them PATIENCE seconds to write nevertheless. Prints JSON: the lost slices, by
key and rank, and the result of listing the checkpoint.

    zarr_race.py OUT [--ranks 4] [--tp 1] [--dtype float32]
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist

from program_arguments import parsed
from trainers import zarr_saving

KEYS = ("fp32_param", "exp_avg", "exp_avg_sq")
ROWS, COLUMNS = 24, 50  # of a tensor-parallel rank's shard


def main() -> None:
    options = parsed({"out": Path}, ranks=4, tp=1, dtype="float32")
    zarr_saving.results(worker, options.ranks, options)


def worker(rank: int, options: argparse.Namespace) -> None:
    from megatron.core.dist_checkpointing.strategies import zarr as strategy

    out, ranks, dp, dtype = options.out, options.ranks, options.ranks // options.tp, getattr(torch, options.dtype)
    keys = {f"optimizer.state.{key}.w": key for key in KEYS}
    shape = (ROWS, COLUMNS)
    state = {
        name: zarr_saving.flattened_shard(key, rank, dp, options.tp, shape, dtype=dtype) for key, name in keys.items()
    }
    zarr_saving.force_race(rank, dp, out.parent)
    dist.barrier()
    strategy.ZarrSaveShardedStrategy("zarr", 1).save(state, out)
    dist.barrier()
    if rank == 0:
        try:
            listed: object = sorted(strategy.ZarrLoadShardedStrategy().load_tensors_metadata(out))
        except ValueError as error:  # a lock file read as an array's metadata
            listed = f"{type(error).__name__}: {error}"
        lost = [(keys[key], owner) for key, owner in zarr_saving.lost_slices(out, keys, ranks, dp, dtype)]
        print(json.dumps({"lost": lost, "listed": listed}))


if __name__ == "__main__":
    main()
