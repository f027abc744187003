"""ckpt_step_optimizer: `--ckpt-step 3` of a `torch` checkpoint loads the optimizer's state of iteration 3, too."""

from pathlib import Path
from typing import Any

from trainers.lazy import mt
from upstream import affected, called, with_fix, without_fix

AFFECTED = affected("ckpt_step_optimizer")


def resumed(version: str, delivery: str) -> Any:
    """The iteration that `--ckpt-step 3` goes on from, and which iteration's weights and optimizer state it loads."""
    found = called(__file__, "resume", version=version, delivery=delivery, layout=[2])
    return found[0]


@without_fix(AFFECTED)
def test_main_parameters_and_moments_are_those_of_the_latest_iteration(version: str, delivery: str) -> None:
    assert resumed(version, delivery) == {"iteration": 6, "weights": 3, "optimizer": 6}


@with_fix(AFFECTED)
def test_everything_is_of_the_iteration_that_was_asked_for(version: str, delivery: str) -> None:
    assert resumed(version, delivery) == {"iteration": 3, "weights": 3, "optimizer": 3}


# What the ranks run


def resume(rank: int, folder: Path) -> dict[str, Any]:
    import lm_run

    run = lm_run.start(folder, "torch")
    saved = {}
    for iteration in (3, 6):
        run.train(iteration - 2, iteration)
        run.save(iteration)
        saved[iteration] = run.state()
    resumed = lm_run.start(folder, "torch", ckpt_step=3)
    iteration = resumed.load()
    weights = resumed.is_at(saved, weights=True)
    optimizer = resumed.is_at({at: {**state, **mt.weights(resumed.model)} for at, state in saved.items()})
    return {"iteration": iteration, "weights": weights, "optimizer": optimizer}
