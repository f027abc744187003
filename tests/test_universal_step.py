"""universal_step: which step the optimizer counts from after a universal load of the real DeepSpeed."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import edits
from ckpt_patches.engine.plan import Outcome
from deepspeed_patches.universal_step import ENGINE, SET, DeepSpeedEngine
from universal_loads import resumed
from upstream import DELIVERIES, all_releases, releases, tree

FIX = "universal_step"

# No other default release has the bug.
NEWEST = "0.12.2"
AFFECTED = releases("deepspeed", newest=NEWEST) if all_releases() else [NEWEST]

STEPS = ["group 0.steps", "group 1.steps"]
AFTER_MORE_STEPS = ("--steps", "2")  # twice as many as are saved


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", ["none"])
@pytest.mark.parametrize("version", AFFECTED)
@pytest.mark.parametrize("options", [(), AFTER_MORE_STEPS], ids=["at the start", "after more steps"])
def test_upstream_counts_from_the_step_of_the_new_run(version: str, delivery: str, options: Sequence[str]) -> None:
    """Silently; all else is loaded."""
    for found in resumed(version, delivery, *options, "--load-only").values():
        assert found["loaded"] == STEPS


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", AFFECTED)
@pytest.mark.parametrize("options", [(), AFTER_MORE_STEPS], ids=["at the start", "after more steps"])
def test_counts_from_the_step_that_was_saved(version: str, delivery: str, options: Sequence[str]) -> None:
    """On every rank, after a second load as well; and the next two losses are those of the uninterrupted run."""
    for found in resumed(version, delivery, *options).values():
        assert found["loaded"] == found["loaded again"] == []
        assert found["losses"] == found["expected"]


@pytest.mark.slow
@pytest.mark.parametrize("version", AFFECTED)
def test_without_the_other_fixes_the_step_is_right(version: str) -> None:
    for found in resumed(version, "hook", fixes=[FIX, "torch_load_weights_only"]).values():
        assert not set(STEPS) & set(found["loaded"])


# The edits themselves


@pytest.mark.parametrize("version", AFFECTED)
def test_what_is_added(version: str) -> None:
    method = edits.definition(tree("deepspeed", version), ENGINE, DeepSpeedEngine._set_optimizer_step, indent=4)
    result, plan = edits.plan(tree("deepspeed", version), FIX)
    assert result.outcome is Outcome.APPLIES
    added = [line for line in edits.added_lines(plan)["engine"] if line]
    assert added == [line.strip() for line in [*method, *SET.splitlines()]]


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", releases("deepspeed", oldest="0.12.3", newest="0.14.0"))
def test_fixed_upstream(version: str, delivery: str, record_property: Callable[[str, object], None]) -> None:
    edits.check_fixed_upstream(version, FIX, record_property)


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", releases("deepspeed", oldest="0.14.1"))
def test_a_release_that_loads_the_step_beside_the_moments_is_not_concerned(
    version: str, delivery: str, record_property: Callable[[str, object], None]
) -> None:
    edits.check_not_present(version, FIX, record_property)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return edits.copy_of(tree("deepspeed", NEWEST), FIX, tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.optimizer.update_lp_params()", "self.optimizer.refresh_params()"),
        ("def load_checkpoint(", "def load_saved("),
    ],
)
def test_unknown_code_is_left_alone(copy: Path, old: str, new: str) -> None:
    assert "engine.py: expected" in edits.check_left_alone(copy, FIX, ENGINE, old, new)
