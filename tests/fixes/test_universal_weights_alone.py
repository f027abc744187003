"""universal_weights_alone: a load of only the weights of a universal checkpoint loads them, and nothing else."""

from pathlib import Path

from trainers.lazy import dt
from upstream import proof

test_weights_or_more_than_the_weights_are_not_as_asked_for, test_the_weights_are_loaded_and_nothing_else = proof(
    __file__, "are not as asked for; no error"
)


# What the ranks run


def bug(folder: Path) -> str:
    return dt.universal_weights_alone(folder, "stage1-2", "stage2-2")
