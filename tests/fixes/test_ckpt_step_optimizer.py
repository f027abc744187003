"""ckpt_step_optimizer: `--ckpt-step 3` of a `torch` checkpoint loads the optimizer's state of iteration 3, too."""

from pathlib import Path
from typing import Any

from trainers.lazy import megatron_lm, mt
from upstream import outcomes

# The iteration that `--ckpt-step 3` goes on from, and which iteration's weights and optimizer state it loads.
test_main_parameters_and_moments_are_those_of_the_latest, test_everything_is_of_the_iteration_that_was_asked_for = (
    outcomes(
        __file__,
        "resume",
        {"iteration": 6, "weights": 3, "optimizer": 6},
        {"iteration": 3, "weights": 3, "optimizer": 3},
        rank=0,
        layout=[2],
    )
)


# What the ranks run


def resume(rank: int, folder: Path) -> dict[str, Any]:
    run = megatron_lm.begin(folder, ckpt_format="torch")
    saved = {}
    for iteration in (3, 6):
        run.train(iteration - 2, iteration)
        run.save(iteration)
        saved[iteration] = run.state()
    resumed = megatron_lm.begin(folder, ckpt_format="torch", ckpt_step=3)
    iteration = resumed.load()
    weights = resumed.is_at(saved, weights=True)
    optimizer = resumed.is_at({at: {**state, **mt.weights(resumed.model)} for at, state in saved.items()})
    return {"iteration": iteration, "weights": weights, "optimizer": optimizer}
