"""bf16_stage0_gradients: after a step in bf16 without ZeRO no gradients are left."""

from pathlib import Path

from trainers.lazy import dt
from upstream import proof

test_gradients_are_left_for_the_next_step_to_add_to, test_no_gradients_are_left = proof(
    __file__, "parameters keep their gradients"
)


# What the ranks run

RANKS = (2, 3)


def bug(folder: Path) -> str:
    left = max(dt.results(train_and_count, ranks, ranks)[0] for ranks in RANKS)
    return f"{left} parameters keep their gradients, to which the next step adds its own" if left else ""


def train_and_count(rank: int, ranks: int) -> int:
    run = dt.engine_of("stage0-2", ranks, universal=False, seed=0)
    dt.train(run, rank, ranks, first=0)
    return sum(parameter.grad is not None for parameter in run.module.parameters())
