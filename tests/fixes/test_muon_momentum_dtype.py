"""muon_momentum_dtype: the momentum of Muon keeps its dtype in a resume at ZeRO 1 and 2 in bf16."""

from pathlib import Path

from trainers.lazy import optimizers
from upstream import proof

test_the_first_step_after_a_resume_fails, test_a_resume_goes_on_bit_for_bit = proof(
    __file__, "RuntimeError: expected dtype float"
)


# What the ranks run


def bug(folder: Path) -> str:
    return optimizers.resumed(folder, "Muon-1", "Muon-2")
