"""Save many times with the real zarr strategy while its writes are made to interleave; count the slices that are lost.

Byte ranges are written in small pieces with pauses between them. Where a chunk is read, changed and written back,
there is a pause behind the read. Prints JSON: the saves, the slices written and the slices lost.

    zarr_interleavings.py OUT [--saves 20] [--ranks 8] [--locks working|nothing]

With `--locks nothing` a lock is granted to everybody, as on a file system with local locks and processes on two hosts.
"""

import argparse
import fcntl
import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

import zarr_saving

SHAPE = (16, 32)
KEY = "optimizer.state.exp_avg.w"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--saves", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--locks", default="working", choices=["working", "nothing"])
    options = parser.parse_args()
    zarr_saving.spawn(worker, options.ranks, options)


def worker(rank: int, options: argparse.Namespace) -> None:
    from megatron.core.dist_checkpointing.strategies import zarr as strategy

    if options.locks == "nothing":
        fcntl.lockf = lambda *args, **kwargs: None
    random.seed(rank)
    write_in_pieces()
    pause_behind_reads()
    saver, lost = strategy.ZarrSaveShardedStrategy("zarr", 1), 0
    for number in range(options.saves):
        out = options.out / str(number)
        if rank == 0:
            out.mkdir(parents=True)
        dist.barrier()
        saver.save({"w": zarr_saving.flattened_shard(KEY, rank, options.ranks, 1, SHAPE)}, out)
        if rank == 0:
            chunk = np.frombuffer((out / KEY / "0.0").read_bytes(), np.float32)
            slices = np.split(chunk, options.ranks)
            lost += sum(bool((piece != owner + 1).any()) for owner, piece in enumerate(slices))
            shutil.rmtree(out)
    if rank == 0:
        print(json.dumps({"saves": options.saves, "slices": options.saves * options.ranks, "lost": lost}))


def write_in_pieces() -> None:
    pwrite = os.pwrite

    def some_bytes(file: int, content: Any, offset: int) -> int:
        time.sleep(random.random() * 1e-3)
        return pwrite(file, content[: random.randrange(1, 100)], offset)

    os.pwrite = some_bytes


def pause_behind_reads() -> None:
    import zarr

    read_chunk = zarr.Array._process_for_setitem

    def read_and_pause(self: Any, *args: Any, **kwargs: Any) -> Any:
        chunk = read_chunk(self, *args, **kwargs)
        time.sleep(random.random() * 3e-3)
        return chunk

    zarr.Array._process_for_setitem = read_and_pause


if __name__ == "__main__":
    main()
