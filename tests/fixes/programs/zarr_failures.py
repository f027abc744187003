"""Save with the real zarr strategy while something fails on rank 2 of 4. Prints JSON: the error of each rank.

    zarr_failures.py OUT FAILURE

There are two tensor-parallel ranks, so ranks 2 and 3 share the second chunk. The caller inspects the remaining files.
"""

import argparse
import errno
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from patience import seconds
from program_arguments import parsed
from trainers import zarr_saving

SHAPE = (64, 128)  # 32 KiB per chunk
KEY = "optimizer.state.exp_avg.w"
VICTIM = 2
PATIENCE = seconds(300)


def main() -> None:
    options = parsed({"out": Path, "failure": str})
    options.out.mkdir(parents=True, exist_ok=True)
    zarr_saving.spawn(worker, 4, options)


def worker(rank: int, options: argparse.Namespace) -> None:
    from megatron.core.dist_checkpointing.strategies import zarr as strategy

    if options.failure == "exists" and rank == 0:
        strategy._create_zarr_array(shard(0), options.out)
    if options.failure == "locks" and rank == 0:
        Path(options.out, f"{KEY}.sync").write_text("a file where a directory would be")
    dist.barrier()
    if options.failure in DAMAGES:
        damage_when_the_others_have_written(DAMAGES[options.failure], options.out / KEY / "1.0", rank, strategy)
    if rank == VICTIM and options.failure == "dies":
        strategy._write_byte_range = lambda *args: die_when_the_others_have_created(options.out / KEY)
    raised = ""
    try:
        strategy.ZarrSaveShardedStrategy("zarr", 1).save({"w": shard(rank)}, options.out)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    if options.failure == "dies":
        # The others have lost the connection to it, so no collective is possible.
        print(f"rank {rank}: {raised}", flush=True)
        sys.stdout.flush()
        os._exit(0)
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, raised)
    if rank == 0:
        print(json.dumps(results))


def shard(rank: int) -> Any:
    return zarr_saving.flattened_shard(KEY, rank, 2, 2, SHAPE)


def damage_when_the_others_have_written(
    damage: Callable[[Path], object], chunk: Path, rank: int, strategy: Any
) -> None:
    write = strategy._write_byte_range

    def in_turn(*args: Any) -> None:
        if rank != VICTIM:
            write(*args)
            dist.barrier()
            return
        dist.barrier()
        damage(chunk)
        write(*args)

    strategy._write_byte_range = in_turn


def die_when_the_others_have_created(array: Path) -> None:
    """Wait, then exit. The end of one rank ends the others, which may be behind."""
    deadline = time.monotonic() + PATIENCE
    chunks = array / "0.0", array / "1.0"
    while not all(map(Path.exists, chunks)) and time.monotonic() < deadline:
        time.sleep(0.01)
    os._exit(9)


def array_is_gone(chunk: Path) -> None:
    chunk.parent.rename(chunk.parent.with_suffix(".moved"))


def disk_fills_up(chunk: Path) -> None:
    """The first write is short, the second finds no space."""
    pwrite = os.pwrite

    def full(file: int, content: Any, offset: int) -> int:
        def no_space(*args: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.pwrite = no_space
        return pwrite(file, content[:100], offset)

    os.pwrite = full


def permission_is_denied(chunk: Path) -> None:
    chunk.chmod(0o444)
    if os.geteuid() == 0:  # root ignores file modes
        os.seteuid(65534)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": array_is_gone,
    "truncated": lambda chunk: os.truncate(chunk, 1000),
    "full": disk_fills_up,
    "denied": permission_is_denied,
}


if __name__ == "__main__":
    main()
