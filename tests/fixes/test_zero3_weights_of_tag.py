"""zero3_weights_of_tag: at ZeRO-3 the weights of an older checkpoint are those of that one."""

from pathlib import Path

from trainers.lazy import dt
from upstream import proof

test_the_weights_are_those_of_the_latest_checkpoint, test_weights_and_main_parameters_are_those_of_the_checkpoint = (
    proof(__file__, "weights are not those saved")
)


# What the ranks run


def bug(folder: Path) -> str:
    return dt.weights_alone(folder, "stage3-2", load_optimizer_states=False)
