"""Save a training of the real megatron-core with its precision-aware optimizer, or load it, with remainders or without.

The training is that of the proof of `param_remainders`. Prints a line of JSON: the main parameters that differ
from those of the save, and the first line of the error.

    param_remainders.py save|load OUT [--ranks 2] [--format fully_reshardable] [--remainders]
"""

import argparse
import runpy
from pathlib import Path

import torch

from live_states import print_differences
from program_arguments import parsed
from trainers import megatron_training as mt
from trainers.stub_fused_adam import joined

FIXES = Path(__file__).resolve().parents[1]
PROOF = runpy.run_path(str(FIXES / "test_param_remainders.py"))


def main() -> None:
    options = parsed({"what": str, "out": Path}, ranks=2, format="fully_reshardable", remainders=False)
    work = {"save": save, "load": load}[options.what]
    print_differences(lambda: mt.results(work, options.ranks, options))


def save(rank: int, options: argparse.Namespace) -> list[str]:
    model, optimizer = PROOF["trained"](options.remainders, range(3))
    mt.save(options.format, model, optimizer, options.out / options.format)
    own = main_params(model, optimizer)
    if rank == 0:
        torch.save(own, options.out / f"{options.format}.states")
    return []


def load(rank: int, options: argparse.Namespace) -> list[str]:
    model, optimizer = PROOF["trained"](options.remainders, range(3, 6))
    mt.load(options.format, model, optimizer, options.out / options.format)
    saved, found = torch.load(options.out / f"{options.format}.states"), main_params(model, optimizer)
    return [name for name, tensor in saved.items() if not torch.equal(tensor, found[name])]


def main_params(model: mt.Model, optimizer: mt.Optimizer) -> dict[str, torch.Tensor]:
    """The full main parameters of all ranks, in fp32."""
    own, found = mt.inner(optimizer), {}
    for name, param in model.named_parameters():
        full = torch.zeros(param.numel())
        if param in own.model_param_group_index_map:
            group, order = own.model_param_group_index_map[param]
            shard = own.optimizer.param_groups[group]["params"][order]
            kept = own.optimizer.state[shard]["master_param"]
            owned = own._get_model_param_range_map(param)["param"]
            weights = param.detach().view(-1)[owned.start : owned.end]
            full[owned.start : owned.end] = joined(weights, kept) if kept.dtype == torch.int16 else kept.detach()
        torch.distributed.all_reduce(full)
        found[name] = full
    return found


if __name__ == "__main__":
    main()
