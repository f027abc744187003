"""ckpt_step_non_persistent: `--ckpt-step` names the checkpoint to load, though a non-persistent one is newer."""

from pathlib import Path

import pytest

from trainers.lazy import megatron_lm
from upstream import called, newest_affected, outcomes

# The iteration that a resume goes on from, and the one whose weights, main parameters and moments it has.
test_the_newest_non_persistent_checkpoint_is_loaded, test_the_checkpoint_that_was_asked_for_is_loaded = outcomes(
    __file__, "resume", [6, 6], [3, 3], rank=0, layout=[2]
)


@pytest.mark.parametrize("function", ["resume_without", "resume_the_non_persistent"])
def test_a_non_persistent_checkpoint_is_loaded_as_before(function: str) -> None:
    version = newest_affected("ckpt_step_non_persistent")[1]
    for delivery in ("none", "hook"):
        assert called(__file__, function, version=version, delivery=delivery, layout=[2])[0] == [6, 6]


# What the ranks run


def resume(rank: int, folder: Path, step: int | None = 3) -> list[int | None]:
    run = megatron_lm.begin(folder, non_persistent_ckpt_type="global")
    saved = {}
    for iteration in (3, 6):
        run.train(iteration - 2, iteration)
        run.save(iteration, non_persistent_ckpt=iteration == 6)
        saved[iteration] = run.state()
    resumed = megatron_lm.begin(folder, non_persistent_ckpt_type="global", ckpt_step=step)
    found = resumed.load()
    return [found, resumed.is_at(saved)]


def resume_without(rank: int, folder: Path) -> list[int | None]:
    """A resume without `--ckpt-step`."""
    return resume(rank, folder, None)


def resume_the_non_persistent(rank: int, folder: Path) -> list[int | None]:
    """`--ckpt-step` names the non-persistent checkpoint."""
    return resume(rank, folder, 6)
