"""Save a small model with the real megatron-core, as torchrun's process on one of several hosts, and end as a training.

Rank 0 writes latest_checkpointed_iteration.txt last, as Megatron-LM does. With `--pause` each rank waits that many
seconds after each tensor, and OUT/begun.RANK is there when it has begun: time to lose a host.

    saving_on_hosts.py OUT BACKEND [--pause 0]
"""

import argparse
import functools
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_saving as saving
from ckpt_patches.demo import megatron_training as mt

ITERATION = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("backend", choices=["torch_dist", "zarr"])
    parser.add_argument("--pause", type=float, default=0.0)
    options = parser.parse_args()
    options.format = "fully_reshardable" if options.backend == "torch_dist" else "fully_sharded_model_space"
    options.dtype, options.tp = "bf16", 1
    options.ranks = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    mt.fork_keeper_of_results()
    dist.init_process_group("gloo")  # by torchrun's environment; its time-out is that of FAKEGPU_PG_TIMEOUT
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    mt.without_transformer_engine()
    train_and_save(options)
    dist.barrier()
    dist.destroy_process_group()


def train_and_save(options: argparse.Namespace) -> None:
    mt.use_inner_optimizer("fused")
    model, optimizer = mt.build(make_model=saving.language_model)
    for iteration in range(ITERATION):
        saving.step(model, optimizer, iteration)
    folder = options.out / f"iter_{ITERATION:07}"
    if dist.get_rank() == 0:  # what a run before this one has left, which nothing says is finished
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    if options.pause:
        write_slowly(options, options.out / f"begun.{dist.get_rank()}")
    saving.save(model, optimizer, ITERATION, folder, options)
    if dist.get_rank() == 0:
        (options.out / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))


def write_slowly(options: argparse.Namespace, sign: Path) -> None:
    """A pause after each tensor that is written; the sign comes with the first."""

    def slow(write: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(write)  # upstream looks at its signature
        def paced(*args: Any, **keywords: Any) -> Any:
            result = write(*args, **keywords)
            sign.touch()
            time.sleep(options.pause)
            return result

        return paced

    if options.backend == "zarr":
        from megatron.core.dist_checkpointing.strategies import zarr as strategy

        strategy._save_to_existing_array = slow(strategy._save_to_existing_array)
    else:
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        filesystem_async._write_item = slow(filesystem_async._write_item)


if __name__ == "__main__":
    main()
