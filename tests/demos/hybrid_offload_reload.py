"""load a model with the optimizer offloaded to the CPU

The first step after the load, at learning rate 0, must not change the weights.
"""

import itertools
from pathlib import Path

import torch

from trainers import megatron_training as mt
from trainers import show

SET_UPS = list(itertools.product((False, True), (0.0, 0.5, 1.0), (False, True)))


COUNT = len(SET_UPS) + 1  # plus Megatron-FSDP


def run(folder: Path) -> str:
    lost = sum(map(any, zip(*mt.results(load_and_step, 2), strict=True)))
    return f"weights lost in {lost} of {COUNT} set-ups, and no error" if lost else ""


def load_and_step(rank: int) -> list[bool]:
    return [*(weights_lost(*set_up) for set_up in SET_UPS), weights_lost_with_fsdp()]


def weights_lost(precision_aware: bool, fraction: float, overlap: bool) -> bool:
    model, optimizer = mt.build(
        offload_fraction=fraction,
        precision_aware=precision_aware,
        overlap=overlap,
        native_fp32=True,
    )
    return bool(mt.weights_lost(model, optimizer))


def weights_lost_with_fsdp() -> bool:
    """Megatron-FSDP's distributed optimizer has no shard map: its parameters are the inner optimizer's."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    shard = torch.nn.Parameter(torch.zeros(6).cuda())
    inner = HybridDeviceOptimizer(
        [{"params": [shard], "lr": 0.0, "weight_decay": 0.0}],
        offload_fraction=1.0,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=False,
    )
    optimizer = object.__new__(DistributedOptimizer)
    optimizer.optimizer, optimizer.is_stub_optimizer = inner, False
    with torch.no_grad():
        shard.fill_(0.75)  # simulates a load of weights
    optimizer.reload_model_params()
    shard.grad = torch.ones_like(shard)
    inner.step()
    return not bool(shard.eq(0.75).all())


if __name__ == "__main__":
    show(run, f"weights kept in all {COUNT} set-ups")
