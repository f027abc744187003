"""scheduler_steps: after a load the schedule is at the checkpoint's step."""

from pathlib import Path

import pytest
import torch

from explore.judged import RIGHT, SILENT, Stack, outcome
from explore.spaces import plainer
from explore.test_explore import SMALL
from trainers.lazy import mt
from upstream import newest_affected, proof

test_the_schedule_goes_on_at_another_step, test_the_schedule_goes_on_at_the_step_of_the_checkpoint = proof(
    __file__, "the schedule goes on at step 14, and no error"
)


# Further cases

FIX = "scheduler_steps"


@pytest.mark.parametrize("load", [{"trained": True}, {"times": 2}, {"trained": True, "override": True}])
def test_a_training_that_rolls_back_goes_on_as_it_was_saved(load: dict[str, object]) -> None:
    """A rolled-back run gets the saved schedule. Without the fix each case is a silent error."""
    _, version = newest_affected(FIX)
    case = plainer(SMALL["megatron"], [{"run": {"scheduler": True}, "load": load}])
    with_all, without = (outcome(case, Stack("megatron", version, without=name)) for name in ("", FIX))
    assert (with_all.kind, without.kind) == (RIGHT, SILENT), (with_all, without)


# What the ranks run


def bug(folder: Path) -> str:
    group = {"params": [torch.nn.Parameter(torch.ones(4))], "max_lr": 1e-3, "min_lr": 0.0, "wd_mult": 1.0}
    scheduler = mt.scheduler(torch.optim.AdamW([group]))
    scheduler.step(increment=4)
    saved = scheduler.state_dict()
    scheduler.step(increment=6)
    scheduler.load_state_dict(saved)
    steps = scheduler.num_steps
    return "" if steps == 4 else f"the schedule goes on at step {steps}, and no error"
