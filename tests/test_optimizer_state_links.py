"""optimizer_state_links: which moments of the real DeepSpeed `safe_get_full_optimizer_state` finds."""

from collections.abc import Callable
from pathlib import Path

import pytest

import edits
from ckpt_patches.engine.plan import Outcome
from universal_loads import written
from upstream import DELIVERIES, releases, tree

FIX = "optimizer_state_links"

AFFECTED = releases("deepspeed", oldest="0.13.2")

FIRST_GROUP = {"w1.weight", "w2.weight"}
OTHER_GROUPS = {"w1.bias", "ln.weight", "ln.bias", "w2.bias", "scale"}


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", ["none"])
@pytest.mark.parametrize("version", AFFECTED)
def test_upstream_finds_those_of_the_first_group_and_none_after_a_load(version: str, delivery: str) -> None:
    for kind, found in written(version, delivery).items():
        if kind == "bf16_optimizer":  # all groups step at once
            assert found["unlinked"] == {}
        else:
            assert found["unlinked"].keys() == OTHER_GROUPS
            assert set(found["unlinked"].values()) == {"ValueError: exp_avg not found in optimizer state fragment"}
        assert found["unlinked after a load"].keys() == FIRST_GROUP | OTHER_GROUPS
        assert set(found["unlinked after a load"].values()) == {
            "TypeError: argument of type 'NoneType' is not iterable"
        }


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", AFFECTED)
def test_those_of_every_group_are_found(version: str, delivery: str) -> None:
    """And are what the flat partitions hold; the run itself, and a load of its own files, are what they were."""
    for kind, found in written(version, delivery).items():
        assert found["unlinked"] == found["unlinked after a load"] == {}
        assert found["reloaded"] == []
        assert found["losses"] == written(version, "none")[kind]["losses"]


# The edits themselves

STAGE_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2"
BF16_OPTIMIZER = "deepspeed.runtime.bf16_optimizer"
NOT_LINKED = "self._hp_optimizer_states_linked = False"
LINK = "self._lazy_init_hp_params_optimizer_state()"


@pytest.mark.parametrize("version", AFFECTED)
def test_what_is_added(version: str) -> None:
    result, plan = edits.plan(tree("deepspeed", version), FIX)
    assert result.outcome is Outcome.APPLIES
    assert edits.added_lines(plan) == {
        "stage_1_and_2": [NOT_LINKED, "if group_no == len(self.optimizer.param_groups) - 1:", LINK],
        "bf16_optimizer": [NOT_LINKED],
    }


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", releases("deepspeed", newest="0.13.1"))
def test_a_release_that_makes_the_moments_first_is_not_concerned(
    version: str, delivery: str, record_property: Callable[[str, object], None]
) -> None:
    edits.check_not_present(version, FIX, record_property)


@pytest.fixture(params=["0.16.2", "0.19.8"])
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return edits.copy_of(tree("deepspeed", request.param), FIX, tmp_path)


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (STAGE_1_AND_2, f"        {LINK}\n", "        self._link_states(group_no)\n"),
        (STAGE_1_AND_2, "def _optimizer_step(", "def _step_of_group("),
        (STAGE_1_AND_2, "def _link_all_hp_params(", "def _link_hp_params("),
        (BF16_OPTIMIZER, "def _link_all_hp_params(", "def _link_hp_params("),
    ],
)
def test_unknown_code_is_left_alone(copy: Path, module: str, old: str, new: str) -> None:
    reason = edits.check_left_alone(copy, FIX, module, old, new)
    assert f"{module.rpartition('.')[2]}.py: expected" in reason


def test_anchor_in_a_comment_or_a_string_is_none(copy: Path) -> None:
    before = edits.added_lines(edits.plan(copy, FIX)[1])
    signature = "    def _optimizer_step(self, group_no):\n"
    edits.rewrite(copy, STAGE_1_AND_2, signature, f'{signature}        """{LINK}"""\n        # {LINK}\n')
    result, plan = edits.plan(copy, FIX)
    assert result.outcome is Outcome.APPLIES
    assert edits.added_lines(plan) == before
