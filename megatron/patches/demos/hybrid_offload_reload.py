"""load a model with the optimizer offloaded to the CPU

Weights are loaded into the model, and the first step, at learning rate 0, has to leave them as they are.
"""

import itertools
from pathlib import Path

import torch

from ckpt_patches.demo import megatron_training as mt
from ckpt_patches.demo import show

SET_UPS = list(itertools.product((False, True), (0.0, 0.5, 1.0), (False, True)))


def run(folder: Path) -> str:
    lost = sum(map(any, zip(*mt.results(load_and_step, 2), strict=True)))
    return f"weights lost in {lost} of {len(SET_UPS)} set-ups, and no error" if lost else ""


def load_and_step(rank: int) -> list[bool]:
    return [weights_lost(*set_up) for set_up in SET_UPS]


def weights_lost(precision_aware: bool, fraction: float, overlap: bool) -> bool:
    model, optimizer = mt.build(
        offload_fraction=fraction,
        precision_aware=precision_aware,
        overlap=overlap,
        native_fp32=True,
    )
    mt.set_weights(
        model, {name: torch.full_like(value, 0.75) for name, value in mt.weights(model).items()}
    )
    loaded = mt.weights(model)
    optimizer.reload_model_params()
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.0, 0.0
    mt.step(model, optimizer, 0)
    return not mt.equal(loaded, mt.weights(model))


if __name__ == "__main__":
    show(run, f"weights kept in all {len(SET_UPS)} set-ups")
