"""load weights into a run with the precision-aware optimizer

The next step, at learning rate 0, must not change them.
"""

from pathlib import Path

from ckpt_patches.demo import megatron_training as mt
from ckpt_patches.demo import show


def run(folder: Path) -> str:
    lost = mt.results(weights_lost, 2)[0]
    return f"{lost} of 4 weights are those from before the load, and no error" if lost else ""


def weights_lost(rank: int) -> int:
    mt.use_inner_optimizer("fused")
    model, optimizer = mt.build(precision_aware=True)
    mt.step(model, optimizer, 0)
    return len(mt.weights_lost(model, optimizer))


if __name__ == "__main__":
    show(run, "the weights are kept")
