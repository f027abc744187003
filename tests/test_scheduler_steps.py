"""scheduler_steps: after a load the schedule is at the checkpoint's step, whatever the run did before."""

import pytest

from explore.judged import RIGHT, SILENT, Stack, outcome
from explore.spaces import plainer
from test_explore import SMALL
from upstream import newest_affected

FIX = "scheduler_steps"


@pytest.mark.parametrize("load", [{"trained": True}, {"times": 2}, {"trained": True, "override": True}])
def test_a_training_that_rolls_back_goes_on_as_it_was_saved(load: dict[str, object]) -> None:
    """A rolled-back run gets the saved schedule. Without the fix each case is a silent error."""
    _, version = newest_affected(FIX)
    case = plainer(SMALL["megatron"], [{"run": {"scheduler": True}, "load": load}])
    with_all, without = (outcome(case, Stack("megatron", version, without=name)) for name in ("", FIX))
    assert (with_all.kind, without.kind) == (RIGHT, SILENT), (with_all, without)
