"""universal_step: the step from which the optimizer counts after a universal load of the real DeepSpeed."""

from collections.abc import Sequence

import pytest

from universal_loads import resumed
from upstream import affected, with_fix, without_fix

FIX = "universal_step"

AFFECTED = affected(FIX)

STEPS = ["group 0.steps", "group 1.steps"]
AFTER_MORE_STEPS = ("--steps", "2")  # twice the saved steps


@without_fix(AFFECTED)
@pytest.mark.parametrize("options", [(), AFTER_MORE_STEPS], ids=["at the start", "after more steps"])
def test_upstream_counts_from_the_step_of_the_new_run(version: str, delivery: str, options: Sequence[str]) -> None:
    """Upstream silently keeps the new run's step; all other state is loaded."""
    for found in resumed(version, delivery, *options, "--load-only").values():
        assert found["loaded"] == STEPS


@with_fix(AFFECTED)
@pytest.mark.parametrize("options", [(), AFTER_MORE_STEPS], ids=["at the start", "after more steps"])
def test_counts_from_the_step_that_was_saved(version: str, delivery: str, options: Sequence[str]) -> None:
    """The step is right on every rank, also after a second load, and the next losses are right."""
    for found in resumed(version, delivery, *options).values():
        assert found["loaded"] == found["loaded again"] == []
        assert found["losses"] == found["expected"]


@pytest.mark.slow
@pytest.mark.parametrize("version", AFFECTED)
def test_without_the_other_fixes_the_step_is_right(version: str) -> None:
    for found in resumed(version, "hook", fixes=[FIX, "torch_load_weights_only"]).values():
        assert not set(STEPS) & set(found["loaded"])
