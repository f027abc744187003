"""universal_empty_group: the real DeepSpeed loads a param group of one element on two ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import edits
from ckpt_patches.engine.plan import Outcome
from deepspeed_patches.universal_empty_group import _step_and_state_keys
from universal_loads import error_of_resume, resumed
from upstream import DELIVERIES, numbers, releases, tree

FIX = "universal_empty_group"

AFFECTED = releases("deepspeed", oldest="0.14.1")

# Upstream's own trouble: these die in a training step at stages 1 and 2, of `tensor_list[0]`, where a rank has nothing
# of a group. They load what the release before them has trained.
TRAIN_NO_SMALL_GROUP, TRAINED_BY = ("0.17.6", "0.18.2"), "0.17.5"


def loading(version: str) -> dict[str, Any]:
    first, last = map(numbers, TRAIN_NO_SMALL_GROUP)
    return {"writer": TRAINED_BY} if first <= numbers(version) <= last else {}


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", ["none"])
@pytest.mark.parametrize("version", AFFECTED)
def test_upstream_dies(version: str, delivery: str) -> None:
    error = error_of_resume(version, small=True, **loading(version))
    assert "if steps[0] is not None" in error
    assert "IndexError: list index out of range" in error


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", AFFECTED)
def test_every_rank_is_where_the_run_was(version: str, delivery: str) -> None:
    """The rank with padding alone, too: its step and its moments are those of the uninterrupted run."""
    options = ["--load-only"] if loading(version) else []
    for found in resumed(version, delivery, *options, small=True, **loading(version)).values():
        assert found["loaded"] == []
        if not options:
            assert found["loaded again"] == []
            assert found["losses"] == found["expected"]


# The edit itself

BASE_OPTIMIZER = "deepspeed.runtime.base_optimizer"
STEP = "if steps[0] is not None:"
ADDED = [
    "if not steps and lp_groups[i]:",
    "# Padding alone: training keeps it at the step of its group, with states of zeros.",
    "folder = os.path.join(checkpoint_dir, self.param_names[lp_groups[i][0]])",
    "steps, opt_keys = _step_and_state_keys(folder)",
    "if steps and steps[0] is not None:",
]


@pytest.mark.parametrize("version", AFFECTED)
def test_what_is_added(version: str) -> None:
    result, plan = edits.plan(tree("deepspeed", version), FIX)
    assert result.outcome is Outcome.APPLIES
    (added,) = edits.added_lines(plan).values()
    function = edits.definition(tree("deepspeed", version), BASE_OPTIMIZER, _step_and_state_keys)
    assert [line for line in added if line] == [*function, *ADDED]


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", releases("deepspeed", newest="0.14.0"))
def test_a_release_that_loads_parameter_by_parameter_is_not_concerned(
    version: str, delivery: str, record_property: Callable[[str, object], None]
) -> None:
    edits.check_not_present(version, FIX, record_property)


@pytest.fixture(params=["0.16.2", "0.19.8"])
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return edits.copy_of(tree("deepspeed", request.param), FIX, tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (STEP, "if self._is_step(steps[0]):"),
        ("hp_param = param_group['params'][0]", "hp_param = self.flat_partition(i)"),
        ("class ZeROOptimizer(", "class ZeroOptimizer("),
    ],
)
def test_unknown_code_is_left_alone(copy: Path, old: str, new: str) -> None:
    reason = edits.check_left_alone(copy, FIX, BASE_OPTIMIZER, old, new)
    assert "base_optimizer.py: expected" in reason


def test_fixed_upstream_by_the_guard_alone(copy: Path) -> None:
    """A release that asks whether there is a step does not die, and the first step makes what is missing."""
    edits.rewrite(copy, BASE_OPTIMIZER, STEP, "if steps and steps[0] is not None:")
    result, plan = edits.plan(copy, FIX)
    assert (result.outcome, plan.files) == (Outcome.ALREADY_THERE, {})


BOTH_APPLY = releases("deepspeed", oldest="0.14.1", newest="0.15.4") or ["0.15.4"]


@pytest.mark.parametrize("version", BOTH_APPLY)
def test_before_or_after_torch_load_weights_only(version: str, tmp_path: Path) -> None:
    """Both edit this file; what they make of it does not depend on which was first."""
    edits.check_in_any_order(tree("deepspeed", version), (FIX, "torch_load_weights_only"), tmp_path)
