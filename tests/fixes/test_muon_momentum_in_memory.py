"""muon_momentum_in_memory: `save_muon_momentum_buffer_in_memory` saves and loads Muon's momentum at ZeRO-3."""

from pathlib import Path

from trainers.lazy import dt, optimizers
from upstream import affected, shown, with_fix, without_fix

RELEASES = affected("muon_momentum_in_memory")


@without_fix(RELEASES)
def test_a_resume_goes_on_from_another_state(version: str, delivery: str) -> None:
    assert "states differ" in shown(__file__, version, delivery)


@with_fix(RELEASES)
def test_a_resume_goes_on_bit_for_bit(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


# What the ranks run


def bug(folder: Path) -> str:
    """One parameter per sub-group: up to 0.19.7 Muon's step gathers only equal sizes over Gloo."""
    options = {"save_muon_momentum_buffer_in_memory": True, "sub_group_size": 4}
    return optimizers.resumed(folder, "Muon-3", tags=(dt.TAG, dt.UNIVERSAL), **options)
