"""universal_empty_group: the real DeepSpeed loads a param group of one element on two ranks."""

from pathlib import Path
from typing import Any

import pytest

import edits
from ckpt_patches.engine.plan import Outcome
from universal_loads import error_of_resume, resumed
from upstream import affected, newest_affected, numbers, tree, with_fix, without_fix

FIX = "universal_empty_group"

AFFECTED = affected(FIX)

# An upstream bug: at stages 1 and 2 these fail in a training step (`tensor_list[0]`) if a rank has nothing of a group.
# They load what the release before them has trained.
TRAIN_NO_SMALL_GROUP, TRAINED_BY = ("0.17.6", "0.18.2"), "0.17.5"


def loading(version: str) -> dict[str, Any]:
    first, last = map(numbers, TRAIN_NO_SMALL_GROUP)
    return {"writer": TRAINED_BY} if first <= numbers(version) <= last else {}


@without_fix(AFFECTED)
def test_upstream_dies(version: str, delivery: str) -> None:
    error = error_of_resume(version, small=True, **loading(version))
    assert "if steps[0] is not None" in error
    assert "IndexError: list index out of range" in error


@with_fix(AFFECTED)
def test_every_rank_is_where_the_run_was(version: str, delivery: str) -> None:
    """The step and moments equal the uninterrupted run's, also on the rank that holds only padding."""
    options = ["--load-only"] if loading(version) else []
    for found in resumed(version, delivery, *options, small=True, **loading(version)).values():
        assert found["loaded"] == []
        if not options:
            assert found["loaded again"] == []
            assert found["losses"] == found["expected"]


# The edit itself

BASE_OPTIMIZER = "deepspeed.runtime.base_optimizer"
STEP = "if steps[0] is not None:"


@pytest.fixture(params=["0.16.2", newest_affected(FIX)[1]])
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return edits.copy_of(tree("deepspeed", request.param), FIX, tmp_path)


def test_fixed_upstream_by_the_guard_alone(copy: Path) -> None:
    """A release that checks for a step does not fail, and its first step creates what is missing."""
    edits.rewrite(copy, BASE_OPTIMIZER, STEP, "if steps and steps[0] is not None:")
    result, plan = edits.plan(copy, FIX)
    assert (result.outcome, plan.files) == (Outcome.NOT_NEEDED, {})
