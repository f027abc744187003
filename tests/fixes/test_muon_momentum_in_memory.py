"""muon_momentum_in_memory: `save_muon_momentum_buffer_in_memory` saves and loads Muon's momentum at ZeRO-3."""

from pathlib import Path

from trainers.lazy import dt, optimizers
from upstream import proof

test_a_resume_goes_on_from_another_state, test_a_resume_goes_on_bit_for_bit = proof(__file__, "states differ")


# What the ranks run


def bug(folder: Path) -> str:
    """One parameter per sub-group: up to 0.19.7 Muon's step gathers only equal sizes over Gloo."""
    options = {"save_muon_momentum_buffer_in_memory": True, "sub_group_size": 4}
    return optimizers.resumed(folder, "Muon-3", tags=(dt.TAG, dt.UNIVERSAL), **options)
