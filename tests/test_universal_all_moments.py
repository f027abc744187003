"""universal_all_moments: which states the real DeepSpeed loads from a universal checkpoint, before and after a step."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import edits
from ckpt_patches.engine.plan import Outcome
from deepspeed_patches.universal_all_moments import ZeROOptimizer
from universal_loads import error_of_resume, resumed
from upstream import DELIVERIES, all_releases, releases, tree

FIX = "universal_all_moments"

# No other default release has the bug.
NEWEST = "0.14.0"
AFFECTED = releases("deepspeed", oldest="0.13.2", newest=NEWEST) if all_releases() else [NEWEST]

AFTER_A_STEP = ("--steps", "1")
# This one dies in a training step at stages 1 and 2 where a rank owns nothing of a group, upstream's own trouble.
TWO_GROUPS = "0.13.2"
OTHER_GROUPS = {"w1.bias", "ln.weight", "ln.bias", "w2.bias", "scale"}


def small(version: str) -> bool:
    """Three groups, and of one a rank owns nothing; else two."""
    return version != TWO_GROUPS


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", ["none"])
@pytest.mark.parametrize("version", AFFECTED)
def test_upstream_dies_before_a_step(version: str, delivery: str) -> None:
    error = error_of_resume(version, small=small(version))
    assert "in get_optim_state_keys" in error
    assert "AttributeError: 'NoneType' object has no attribute 'keys'" in error


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", ["none"])
@pytest.mark.parametrize("version", AFFECTED)
def test_upstream_loads_the_first_groups_moments_after_a_step(version: str, delivery: str) -> None:
    """And is one step ahead of the run that saved; silently."""
    for kind, found in resumed(version, delivery, *AFTER_A_STEP, small=small(version)).items():
        moments = {name for name in found["loaded"] if ".exp_avg" in name}
        expected = set() if kind == "bf16_optimizer" else OTHER_GROUPS  # that steps all groups at once
        assert {name.rpartition(".")[0] for name in moments} == expected
        assert set(found["loaded"]) - moments == {
            f"group {number}.steps" for number in range(3 if small(version) else 2)
        }
        assert found["losses"] != found["expected"]


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", AFFECTED)
@pytest.mark.parametrize("options", [(), AFTER_A_STEP], ids=["before a step", "after a step"])
def test_loads_all_that_was_saved(version: str, delivery: str, options: Sequence[str]) -> None:
    """Bit for bit, the steps of all ranks as well; and the next two losses are those of the uninterrupted run."""
    for found in resumed(version, delivery, *options, small=small(version)).values():
        assert found["loaded"] == found["loaded again"] == []
        assert found["masters are"] == ["fp32"]
        assert found["unlinked"] == found["unlinked after a step"] == {}
        assert found["losses"] == found["expected"]


@pytest.mark.slow
def test_without_the_other_fixes() -> None:
    """It makes its own links, as far as the load needs them."""
    found = resumed(NEWEST, "hook", *AFTER_A_STEP, small=small(NEWEST), fixes=[FIX, "torch_load_weights_only"])
    assert all(result["loaded"] == result["loaded again"] == [] for result in found.values())
    assert all(result["losses"] == result["expected"] for result in found.values())


# The edits themselves

STAGE_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2"
BF16_OPTIMIZER = "deepspeed.runtime.bf16_optimizer"
ENGINE = "deepspeed.runtime.engine"
STEP = "self.update_optimizer_step(step=client_states['iteration'] + 1)"


@pytest.mark.parametrize("version", AFFECTED)
def test_what_is_added(version: str) -> None:
    result, plan = edits.plan(tree("deepspeed", version), FIX)
    assert result.outcome is Outcome.APPLIES
    method = edits.definition(tree("deepspeed", version), STAGE_1_AND_2, ZeROOptimizer._link_states_to_load, indent=4)
    assert {module: [line for line in added if line] for module, added in edits.added_lines(plan).items()} == {
        "stage_1_and_2": [*method, "self._link_states_to_load(self.bit16_groups)"],
        "bf16_optimizer": [*method, "self._link_states_to_load(self.bf16_groups)"],
        "engine": [STEP.replace(" + 1", "")],
    }


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", [*releases("deepspeed", newest="0.13.1"), *releases("deepspeed", oldest="0.14.1")])
def test_a_release_that_does_not_load_into_the_states_of_a_step_is_not_concerned(
    version: str, delivery: str, record_property: Callable[[str, object], None]
) -> None:
    """Up to 0.13.1 the optimizer is one step ahead of the iterations, and stays so."""
    edits.check_not_present(version, FIX, record_property)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return edits.copy_of(tree("deepspeed", NEWEST), FIX, tmp_path)


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (STAGE_1_AND_2, "for i, _ in enumerate", "for i in enumerate"),
        (BF16_OPTIMIZER, "for i, _ in enumerate", "for i in enumerate"),
        (BF16_OPTIMIZER, "def _load_hp_checkpoint_state(", "def _load_states("),
        (ENGINE, STEP, "self.update_optimizer_step(step=self.global_steps)"),
    ],
)
def test_unknown_code_is_left_alone(copy: Path, module: str, old: str, new: str) -> None:
    reason = edits.check_left_alone(copy, FIX, module, old, new)
    assert f"{module.rpartition('.')[2]}.py: expected" in reason


@pytest.mark.parametrize("version", AFFECTED)
@pytest.mark.parametrize("other", ["torch_load_weights_only", "optimizer_state_links"])
def test_before_or_after_another_fix_of_these_files(version: str, other: str, tmp_path: Path) -> None:
    edits.check_in_any_order(tree("deepspeed", version), (FIX, other), tmp_path)
