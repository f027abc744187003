"""Save a run of the real megatron.training with its optimizer and scheduler, or load it, with fingerprints.

Prints a line of JSON: the error, if any. `--odd` makes the loaded run differ from the saved one: `scheduler` starts
with a scheduler that has taken some steps, `position` changes the consumed samples during the load, `no_scheduler`
loads no scheduler and steps it.

    run_proof.py save|load OUT [--ranks 2] [--tp 1] [--ep 1] [--odd scheduler|position|no_scheduler] [--no-rng]
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from program_arguments import parsed
from trainers import megatron_lm
from trainers import megatron_training as mt
from trainers.ranks import RankError

ITERATION, SAMPLES = 3, 24


def main() -> None:
    options = parsed({"what": str, "out": Path}, ranks=2, tp=1, ep=1, odd="", no_rng=False)
    megatron_lm.import_training()
    error = ""
    try:
        mt.results({"save": save, "load": load}[options.what], options.ranks, options)
    except RankError as found:
        error = str(found)
    print(json.dumps({"error": error}), flush=True)


def begin(options: argparse.Namespace) -> tuple[Any, Any, Any, Any, Any]:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    args = megatron_lm.arguments(
        options.out / "run", options.tp, options.ep, use_distributed_optimizer=True, no_load_rng=options.no_rng
    )
    megatron_lm.start(options.tp, options.ep)
    mt.use_inner_optimizer("fused")
    model, optimizer = mt.build(settings={"min_lr": 1e-4})
    steps: dict[str, Any] = {"lr_warmup_steps": 4, "lr_decay_steps": 80, "wd_incr_steps": 80}
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-2, min_lr=1e-4, lr_decay_style="linear", start_wd=0.1, end_wd=0.1,
        wd_incr_style="constant", **steps,
    )  # fmt: skip
    return megatron_lm.import_training(), model, optimizer, scheduler, args


def save(rank: int, options: argparse.Namespace) -> None:
    checkpointing, model, optimizer, scheduler, args = begin(options)
    for number in range(ITERATION):
        mt.step(model, optimizer, number)
        scheduler.step(increment=SAMPLES // ITERATION)
    args.consumed_train_samples = SAMPLES
    draw(rank)
    checkpointing.get_args = lambda: args
    checkpointing.save_checkpoint(ITERATION, [model], optimizer, scheduler, 0)


def draw(rank: int) -> None:
    """Draw as many model random numbers on all data-parallel ranks, and different counts for host and experts."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.rand(3)
    for name, numbers in (("model-parallel-rng", 5), ("expert-parallel-rng", 2 + rank)):
        with get_cuda_rng_tracker().fork(name):
            torch.rand(numbers)
    for _ in range(rank + 1):
        random.random()


def load(rank: int, options: argparse.Namespace) -> None:
    checkpointing, model, optimizer, scheduler, args = begin(options)
    checkpointing.get_args = lambda: args
    checkpointing.update_num_microbatches = lambda **_: odd_position(options, args)
    if options.odd == "scheduler":
        scheduler.step(increment=8)
    try:
        checkpointing.load_checkpoint([model], optimizer, None if options.odd == "no_scheduler" else scheduler)
    except Exception as error:
        print(error, file=sys.stderr, flush=True)  # all lines of it
        raise
    if options.odd == "no_scheduler":
        scheduler.step(increment=8)
    dist.barrier()


def odd_position(options: argparse.Namespace, args: Any) -> None:
    args.consumed_train_samples += 8 if options.odd == "position" else 0


if __name__ == "__main__":
    main()
