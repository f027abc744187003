"""stage0_weights_alone: a load of only the weights without ZeRO refreshes the main parameters."""

import re
from pathlib import Path

from trainers.lazy import dt
from upstream import proof

OF_0_17_6 = "AttributeError: 'FP16_UnfusedOptimizer' object has no attribute '_restore_from_bit16_weights'"

test_the_next_step_starts_from_other_weights_or_the_load_fails, test_weights_and_masters_are_those_saved = proof(
    __file__, re.compile(f"masters not the weights; no error|^{OF_0_17_6}")
)


# What the ranks run


def bug(folder: Path) -> str:
    return dt.weights_alone(folder, "stage0_fp16-2", "stage0-2", load_optimizer_states=False)
