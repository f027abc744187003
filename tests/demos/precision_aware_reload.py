"""load weights into a run with the precision-aware optimizer

The next step, at learning rate 0, must not change them.
"""

from pathlib import Path

from trainers import megatron_training as mt


def load_and_step(rank: int, folder: Path) -> str:
    mt.use_inner_optimizer("fused")
    model, optimizer = mt.build(precision_aware=True)
    mt.step(model, optimizer, 0)
    lost = len(mt.weights_lost(model, optimizer))
    return f"{lost} of 4 weights are those from before the load, and no error" if lost else ""


if __name__ == "__main__":
    mt.show_result(load_and_step, 2, "the weights are kept")
