"""muon_momentum_dtype: the momentum of Muon keeps its dtype in a resume at ZeRO 1 and 2 in bf16."""

from pathlib import Path

from trainers.lazy import optimizers
from upstream import affected, shown, with_fix, without_fix

RELEASES = affected("muon_momentum_dtype")


@without_fix(RELEASES)
def test_the_first_step_after_a_resume_fails(version: str, delivery: str) -> None:
    assert "RuntimeError: expected dtype float" in shown(__file__, version, delivery)


@with_fix(RELEASES)
def test_a_resume_goes_on_bit_for_bit(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


# What the ranks run


def bug(folder: Path) -> str:
    return optimizers.resumed(folder, "Muon-1", "Muon-2")
