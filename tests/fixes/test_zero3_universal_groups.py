"""zero3_universal_groups: the settings and steps of a ZeRO-3 run after a resume from a universal checkpoint."""

from pathlib import Path
from typing import Any

import pytest

import edits
from ckpt_patches.engine.plan import Outcome
from upstream import affected, newest_affected, newest_by_default, tree, with_fix, without_fix
from zero3_resumes import resumed, uninterrupted

FIX = "zero3_universal_groups"
STAGE3 = "deepspeed.runtime.zero.stage3"

AFFECTED = affected(FIX)
NEWEST = newest_affected(FIX)[1]
RUN = ("stage3_groups", 2)  # ranks; two param groups, each split in two by `sub_group_size`
ONE_GROUP = ("stage3_sub_groups", 2)


def decays(settings: dict[str, Any]) -> list[float]:
    return [group["weight_decay"] for group in settings["groups"]]


@without_fix(newest_by_default(AFFECTED))
def test_upstream_takes_the_settings_of_the_first_group_and_one_step_for_all(version: str, delivery: str) -> None:
    """Silently, all tensors are right after the load and wrong two steps later."""
    found, expected = resumed(version, *RUN, delivery), uninterrupted(version, *RUN)
    assert found["different"] == []
    assert [decays(found["settings"][0]), decays(expected["settings"][0])] == [[0.01, 0.01], [0.01, 0.0]]
    assert [found["settings"][1]["steps"], expected["settings"][1]["steps"]] == [[10] * 4, [4] * 4]
    assert len(found["different_end"]) == 21
    assert found["losses"][1] != expected["losses"][1]


@with_fix(newest_by_default(AFFECTED))
def test_a_resume_goes_on_as_if_it_had_not_stopped(version: str, delivery: str) -> None:
    """Tensors after the load, groups' settings, steps, the next losses and the tensors after them are equal."""
    assert resumed(version, *RUN, delivery) == uninterrupted(version, *RUN)


@pytest.mark.slow
@pytest.mark.parametrize("delivery", ["none", "hook"])
def test_one_group_that_is_cut_in_several(delivery: str) -> None:
    """A group in several sub-groups resumes with one set of settings and several steps."""
    found, expected = resumed(NEWEST, *ONE_GROUP, delivery), uninterrupted(NEWEST, *ONE_GROUP)
    steps = len(expected["settings"][1]["steps"])
    assert steps > 2
    if delivery == "none":
        assert found["settings"][1]["steps"] == [2 + 2 * steps] * steps
        assert found["settings"][0] == expected["settings"][0]
        return
    assert found == expected


# The edits themselves


@pytest.fixture(params=[NEWEST])
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return edits.copy_of(tree("deepspeed", request.param), FIX, tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.optimizer.state[fp32_param]['step'] = state_step", "state_step.copy_(state_step)"),
        ('optim_sd[OPTIMIZER_STATE_DICT]["param_groups"][0].items()', "saved_groups[param_group].items()"),
    ],
)
def test_a_release_that_may_have_mended_one_is_reported(copy: Path, old: str, new: str) -> None:
    """A release with other code is reported: it may have the bug or not."""
    assert "found it 0 times" in edits.check_left_alone(copy, FIX, STAGE3, old, new)


def test_a_release_that_has_mended_one_is_given_the_other(copy: Path) -> None:
    """A release with one correction gets the other: the two bugs are independent."""
    mended = "self.optimizer.state[fp32_param]['step'] = own_step"
    edits.rewrite(copy, STAGE3, "self.optimizer.state[fp32_param]['step'] = state_step", mended)
    result, plan = edits.plan(copy, FIX)
    assert result.outcome is Outcome.APPLIES
    assert mended in plan.files[STAGE3].patched.decode()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("            for key, value in optim_sd[", "            for key, value in () or optim_sd["),
        ("                    param_group[key] = value\n", "                    param_group[key] = float(value)\n"),
    ],
)
def test_code_of_another_shape_is_left_alone(copy: Path, old: str, new: str) -> None:
    edits.check_left_alone(copy, FIX, STAGE3, old, new)
