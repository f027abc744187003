"""Run one rank of a group whose other ranks may have other fixes: save in the zarr format, and print the outcome.

Prints a line of JSON: the first line of the error, or "", and the seconds that it took.

    ranks_that_differ.py OUT    uses RANK, WORLD_SIZE and MASTER_PORT
"""

import json
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from patience import seconds
from trainers import megatron_training as mt


def main() -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mt._start(rank, worker, ranks, os.environ["MASTER_PORT"], (1, 1), Path(sys.argv[1]))


def worker(rank: int, out: Path) -> None:
    mt.use_inner_optimizer("fused")
    model, optimizer = mt.build()
    mt.step(model, optimizer, 0)
    start, error = time.monotonic(), ""
    try:
        save(model, optimizer, out / "first")
        fail_where_it_asks_again()
        save(model, optimizer, out / "second")
    except RuntimeError as raised:
        error = str(raised).splitlines()[0]
    print(json.dumps({"error": error, "seconds": time.monotonic() - start}), flush=True)
    time.sleep(seconds(1))  # rank 0 holds the store, which the others read at the same time
    os._exit(0)  # as a job with a failed rank ends: no barrier, no group shutdown


def fail_where_it_asks_again() -> None:
    store = dist.distributed_c10d._get_default_store

    def checked() -> dist.Store:
        if sys._getframe(1).f_code.co_name == "_check_all_ranks_have_fix":
            raise RuntimeError("the other ranks are asked again")
        return store()

    dist.distributed_c10d._get_default_store = checked


def save(model: mt.Model, optimizer: mt.Optimizer, out: Path) -> None:
    mt.write(mt.sharded_state_dict("fully_sharded_model_space", model, optimizer, is_loading=False), out, "zarr")


main()
