"""load of dp_reshardable state, with steps taken before"""

from pathlib import Path
from typing import Any

import torch

from ckpt_patches.demo import megatron_training as mt
from ckpt_patches.demo import show


def load(rank: int) -> str:
    """The step that a load finds is what `load_state_dict` has set; the buckets bring that of the fresh optimizer."""
    mt.use_inner_optimizer("torch")
    model, optimizer = mt.build()
    for iteration in range(3):
        mt.step(model, optimizer, iteration)
    inner = mt.inner(optimizer)
    state = inner.get_parameter_state_dp_reshardable()
    for bucket in buckets(state):
        for tensors in bucket:
            tensors.update(step=torch.tensor(1.0), padding=False)
    before = steps(inner)
    inner.load_parameter_state_from_dp_reshardable(state)
    return "" if steps(inner) == before else f"step {steps(inner)} in place of {before}"


def buckets(state: Any) -> list[Any]:
    return [bucket for k, v in state.items() if isinstance(k, int) for each in v.values() for bucket in each]


def steps(inner: Any) -> set[float]:
    return {float(state["step"]) for state in inner.optimizer.state.values()}


def run(folder: Path) -> str:
    return str(mt.results(load, 1)[0])


if __name__ == "__main__":
    show(run, "the step is the loaded one")
