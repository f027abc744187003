"""Time a save of flattened shards with the real zarr strategy, and of the same bytes to plain files. Prints JSON.

    zarr_timing.py OUT [--ranks 8] [--arrays 4] [--megabytes 64] [--repeat 5]

The two alternate: `save` and `plain` are the slowest rank's seconds in each repetition; `growth` is the largest growth
of a rank's peak memory in a save, divided by the bytes of its own shard.
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from program_arguments import parsed
from trainers import zarr_saving

COLUMNS = 1024


def main() -> None:
    options = parsed({"out": Path}, ranks=8, arrays=4, megabytes=64, repeat=5)
    zarr_saving.spawn(worker, options.ranks, options)


def worker(rank: int, options: argparse.Namespace) -> None:
    from megatron.core.dist_checkpointing.strategies import zarr as strategy

    shape = (options.megabytes * 2**20 // 4 // COLUMNS, COLUMNS)
    keys = [f"optimizer.state.{number}.w" for number in range(options.arrays)]
    state = {key: zarr_saving.flattened_shard(key, rank, options.ranks, 1, shape) for key in keys}
    saver, growth = strategy.ZarrSaveShardedStrategy("zarr", 1), 0.0
    own = sum(tensor.data.nbytes for tensor in state.values())

    def plain(out: Path) -> None:
        for key, tensor in state.items():
            (out / f"{key}.{rank}").write_bytes(tensor.data.numpy())
        dist.barrier()

    seconds: dict[str, list[float]] = {"save": [], "plain": []}
    for number in range(options.repeat):
        before = forget_peak()
        seconds["save"].append(timed(lambda out: saver.save(state, out), options.out / f"save{number}", rank))
        growth = max(growth, (resident("VmHWM") - before) / own)
        seconds["plain"].append(timed(plain, options.out / f"plain{number}", rank))
    results: list[Any] = [None] * options.ranks
    dist.all_gather_object(results, (seconds, growth))
    if rank == 0:
        slowest = {name: [max(times) for times in zip(*(s[name] for s, _ in results), strict=True)] for name in seconds}
        print(json.dumps({**slowest, "growth": max(growth for _, growth in results)}))


def timed(write: Callable[[Path], None], out: Path, rank: int) -> float:
    """The seconds of this rank's part, written to a new folder that is removed afterwards."""
    if rank == 0:
        out.mkdir(parents=True)
    dist.barrier()
    start = time.perf_counter()
    write(out)
    elapsed = time.perf_counter() - start
    dist.barrier()
    if rank == 0:
        shutil.rmtree(out)
    dist.barrier()
    return elapsed


def forget_peak() -> int:
    """Reset this process's peak memory to its current memory, and return that in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(line: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[line].split()[0]) * 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
