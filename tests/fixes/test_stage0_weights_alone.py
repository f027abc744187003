"""stage0_weights_alone: a load of only the weights without ZeRO refreshes the main parameters."""

from pathlib import Path

from trainers.lazy import dt
from upstream import affected, shown, with_fix, without_fix

RELEASES = affected("stage0_weights_alone")


@without_fix(RELEASES)
def test_the_next_step_would_start_from_other_weights_or_the_load_fails(version: str, delivery: str) -> None:
    found = shown(__file__, version, delivery)
    of_0_17_6 = "AttributeError: 'FP16_UnfusedOptimizer' object has no attribute '_restore_from_bit16_weights'"
    assert "masters not the weights; no error" in found or found.startswith(of_0_17_6)


@with_fix(RELEASES)
def test_weights_and_main_parameters_are_those_of_the_checkpoint(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


# What the ranks run


def bug(folder: Path) -> str:
    return dt.weights_alone(folder, "stage0_fp16-2", "stage0-2", load_optimizer_states=False)
