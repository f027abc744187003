"""universal_weights_alone: a load of only the weights of a universal checkpoint loads them, and nothing else."""

from pathlib import Path

from trainers.lazy import dt
from upstream import affected, shown, with_fix, without_fix

RELEASES = affected("universal_weights_alone")


@without_fix(RELEASES)
def test_weights_or_more_than_the_weights_are_not_as_asked_for(version: str, delivery: str) -> None:
    assert "are not as asked for; no error" in shown(__file__, version, delivery)


@with_fix(RELEASES)
def test_the_weights_are_loaded_and_nothing_else(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


# What the ranks run


def bug(folder: Path) -> str:
    return dt.universal_weights_alone(folder, "stage1-2", "stage2-2")
