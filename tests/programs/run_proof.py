"""Save a run of the real megatron.training with its optimizer and scheduler, or load it, with fingerprints.

Prints a line of JSON: the error, if any. `--odd` makes the loaded run differ from the saved one: `scheduler` starts
with a scheduler that has taken some steps, `position` changes the consumed samples during the load, `no_scheduler`
loads no scheduler and steps it.

    run_proof.py save|load OUT [--ranks 2] [--tp 1] [--ep 1] [--odd scheduler|position|no_scheduler]
"""

import argparse
import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from program_arguments import parsed
from trainers import megatron_lm
from trainers import megatron_training as mt
from trainers.ranks import RankError

ITERATION = 3


def main() -> None:
    options = parsed({"what": str, "out": Path}, ranks=2, tp=1, ep=1, odd="")
    megatron_lm.import_training()
    error = ""
    try:
        mt.results({"save": save, "load": load}[options.what], options.ranks, options)
    except RankError as found:
        error = str(found)
    print(json.dumps({"error": error}), flush=True)


def begin(options: argparse.Namespace) -> megatron_lm.Run:
    return megatron_lm.begin(options.out / "run", options.tp, options.ep)


def save(rank: int, options: argparse.Namespace) -> None:
    run = begin(options)
    run.train(1, ITERATION)
    draw(rank)
    run.save(ITERATION)


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
    run = begin(options)
    run.checkpointing.update_num_microbatches = lambda **_: odd_position(options, run)
    if options.odd == "scheduler":
        run.scheduler.step(increment=8)
    try:
        (replace(run, scheduler=None) if options.odd == "no_scheduler" else run).load()
    except Exception as error:
        print(error, file=sys.stderr, flush=True)  # all lines of it
        raise
    if options.odd == "no_scheduler":
        run.scheduler.step(increment=8)
    dist.barrier()


def odd_position(options: argparse.Namespace, run: megatron_lm.Run) -> None:
    run.args.consumed_train_samples += 8 if options.odd == "position" else 0


if __name__ == "__main__":
    main()
