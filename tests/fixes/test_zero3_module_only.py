"""zero3_module_only: at ZeRO-3 `load_module_only` loads the module, and main parameters that round to it."""

from pathlib import Path

from trainers.lazy import dt
from upstream import proof

test_the_next_step_would_start_from_other_weights, test_weights_and_main_parameters_are_those_of_the_checkpoint = proof(
    __file__, "masters not the weights; no error"
)


# What the ranks run


def bug(folder: Path) -> str:
    return dt.weights_alone(folder, "stage3-2", load_module_only=True)
