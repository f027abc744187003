"""check for gradients after a step in bf16 without ZeRO"""

from pathlib import Path

from trainers import cases, show
from trainers import deepspeed_training as dt

RANKS = (2, 3)


def run(folder: Path) -> str:
    left = max(dt.results(train_and_count, ranks, ranks)[0] for ranks in cases(RANKS))
    return f"{left} parameters keep their gradients, to which the next step adds its own" if left else ""


def train_and_count(rank: int, ranks: int) -> int:
    run = dt.engine_of("stage0-2", ranks, universal=False, seed=0)
    dt.train(run, rank, ranks, first=0)
    return sum(parameter.grad is not None for parameter in run.module.parameters())


if __name__ == "__main__":
    show(run, "no gradients are left")
