"""Save a training with a param group of fp32 and bf16 parameters, or load it, on ranks of the real megatron-core.

The training is that of the proof of `mixed_dtype_group_order`; with `--alike` all weights are and stay 1, but
moments differ. Prints a line of JSON: the states that differ from the live ones of the save, and the first line of the
error.

    mixed_groups.py save|load OUT [--ranks 2] [--format fully_reshardable] [--alike]
"""

import argparse
import runpy
from pathlib import Path
from typing import Any

import torch

from live_states import print_differences
from program_arguments import parsed
from trainers import megatron_training as mt

FIXES = Path(__file__).resolve().parents[1]
PROOF = runpy.run_path(str(FIXES / "test_mixed_dtype_group_order.py"))


def main() -> None:
    options = parsed({"what": str, "out": Path}, ranks=2, format="fully_reshardable", alike=False)
    work = {"save": save, "load": load}[options.what]
    print_differences(lambda: mt.results(work, options.ranks, options))


def save(rank: int, options: argparse.Namespace) -> list[str]:
    model, optimizer = trained(options, 0)
    mt.save(options.format, model, optimizer, options.out / options.format)
    states = PROOF["live_states"](model, optimizer)
    if rank == 0:
        torch.save((states, mt.weights(model)), options.out / f"{options.format}.pt")
    return []


def load(rank: int, options: argparse.Namespace) -> list[str]:
    model, optimizer = trained(options, 3)
    mt.load(options.format, model, optimizer, options.out / options.format)
    states, weights = torch.load(options.out / f"{options.format}.pt")
    saved, found = {**states, **weights}, {**PROOF["live_states"](model, optimizer), **mt.weights(model)}
    return [key for key, state in saved.items() if not torch.equal(state, found[key])]


def trained(options: argparse.Namespace, start: int) -> tuple[mt.Model, mt.Optimizer]:
    if not options.alike:
        found: tuple[mt.Model, mt.Optimizer] = PROOF["trained"](start)
        return found
    mt.use_inner_optimizer("fused")
    model, optimizer = mt.build(make_model=all_ones, settings={"lr": 0.0})
    for iteration in range(start, start + 3):
        mt.step(model, optimizer, iteration)
    return model, optimizer


def all_ones(config: Any, dtype: torch.dtype, native_fp32: bool) -> mt.Model:
    model = PROOF["network"](config, dtype, native_fp32)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    return model


if __name__ == "__main__":
    main()
