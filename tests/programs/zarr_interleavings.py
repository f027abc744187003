"""Save many times with the real zarr strategy while its writes are forced to interleave; count the lost slices.

Byte ranges are written in small pieces with pauses between them. A read-modify-write of a chunk has a pause after the
read. Prints JSON: the saves, the slices written and the slices lost.

    zarr_interleavings.py OUT [--saves 20] [--ranks 8] [--locks working|nothing]

With `--locks nothing` every lock is granted, as on a file system with local locks and processes on two hosts.
"""

import argparse
import fcntl
import json
import random
import shutil
from pathlib import Path

import torch.distributed as dist

from ckpt_patches.demo import zarr_saving
from program_arguments import parsed

SHAPE = (16, 32)
KEY = "optimizer.state.exp_avg.w"


def main() -> None:
    options = parsed({"out": Path}, saves=20, ranks=8, locks="working")
    zarr_saving.spawn(worker, options.ranks, options)


def worker(rank: int, options: argparse.Namespace) -> None:
    from megatron.core.dist_checkpointing.strategies import zarr as strategy

    if options.locks == "nothing":
        fcntl.lockf = lambda *args, **kwargs: None
    random.seed(rank)
    zarr_saving.write_in_pieces()
    zarr_saving.pause_behind_reads()
    saver, lost = strategy.ZarrSaveShardedStrategy("zarr", 1), 0
    for number in range(options.saves):
        out = options.out / str(number)
        if rank == 0:
            out.mkdir(parents=True)
        dist.barrier()
        saver.save({"w": zarr_saving.flattened_shard(KEY, rank, options.ranks, 1, SHAPE)}, out)
        if rank == 0:
            lost += len(zarr_saving.lost_slices(out, [KEY], options.ranks, options.ranks))
            shutil.rmtree(out)
    if rank == 0:
        print(json.dumps({"saves": options.saves, "slices": options.saves * options.ranks, "lost": lost}))


if __name__ == "__main__":
    main()
