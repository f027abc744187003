"""zero3_weights_of_tag: at ZeRO-3 the weights of an older checkpoint are those of that one."""

from pathlib import Path

from trainers.lazy import dt
from upstream import affected, shown, with_fix, without_fix

RELEASES = affected("zero3_weights_of_tag")


@without_fix(RELEASES)
def test_the_weights_are_those_of_the_latest_checkpoint(version: str, delivery: str) -> None:
    assert "weights are not those saved" in shown(__file__, version, delivery)


@with_fix(RELEASES)
def test_weights_and_main_parameters_are_those_of_the_checkpoint(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


# What the ranks run


def bug(folder: Path) -> str:
    return dt.weights_alone(folder, "stage3-2", load_optimizer_states=False)
