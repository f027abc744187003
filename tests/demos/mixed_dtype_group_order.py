"""resume with fp32 parameters on fewer ranks

One param group has two bf16 parameters and an fp32 one, of the same shape and without weight decay.
"""

from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from trainers import megatron_training as mt
from trainers import show

FORMAT = "fully_reshardable"
STATES = ("param", "exp_avg", "exp_avg_sq")


def run(folder: Path) -> str:
    """Save on two ranks, and load on one."""
    mt.results(save, 2, folder)
    different = mt.results(load, 1, folder)[0]
    return f"{len(different)} of 9 states differ, and no error" if different else ""


def network(config: Any, dtype: torch.dtype, native_fp32: bool) -> Any:
    tiny = mt.tiny_model(config, dtype, native_fp32)
    del tiny.a, tiny.b
    tiny.a = torch.nn.Module()
    tiny.a.weight = torch.nn.Parameter(torch.rand(64).to(dtype))
    tiny.bias = torch.nn.Parameter(torch.rand(64).to(dtype))
    tiny.gain = torch.nn.Parameter(torch.rand(64))
    tiny.forward = lambda x: (x.repeat(1, 4) * tiny.a.weight + tiny.bias).float() * tiny.gain
    return tiny


def trained(start: int) -> tuple[mt.Model, mt.Optimizer]:
    mt.use_inner_optimizer("fused")
    if not hasattr(numpy, "product"):
        vars(numpy)["product"] = numpy.prod  # 0.11 calls it, but NumPy 2 removed it
    model, optimizer = mt.build(make_model=network)
    for iteration in range(start, start + 3):
        mt.step(model, optimizer, iteration)
    return model, optimizer


def save(rank: int, folder: Path) -> None:
    model, optimizer = trained(0)
    mt.save(FORMAT, model, optimizer, folder / "checkpoint")
    states = live_states(model, optimizer)
    if rank == 0:
        torch.save(states, folder / "states.pt")


def load(rank: int, folder: Path) -> list[str]:
    model, optimizer = trained(3)
    mt.load(FORMAT, model, optimizer, folder / "checkpoint")
    saved, found = torch.load(folder / "states.pt"), live_states(model, optimizer)
    return [key for key, state in saved.items() if not torch.equal(state, found[key])]


def live_states(model: mt.Model, optimizer: mt.Optimizer) -> dict[str, torch.Tensor]:
    """Complete main parameters and moments, looked up as a step does, by pairs of parameter and shard."""
    own = mt.inner(optimizer)
    pairs = [
        pair
        for params, shards in (
            (own.model_float16_groups, own.shard_fp32_from_float16_groups),
            (own.model_fp32_groups, own.shard_fp32_groups),
        )
        for group in zip(params, shards, strict=True)
        for pair in zip(*group, strict=True)
    ]
    states = {}
    for name, param in model.named_parameters():
        for key in STATES:
            full = torch.zeros(param.numel())
            for shard in (shard for other, shard in pairs if other is param):
                owned = own._get_model_param_range_map(param)["param"]
                state = shard if key == "param" else own.optimizer.state[shard][key]
                full[owned.start : owned.end] = state.detach()
            dist.all_reduce(full)
            states[f"{name}.{key}"] = full
    return states


if __name__ == "__main__":
    show(run, "each parameter has its own states after the load")
