"""universal_all_moments: states that the real DeepSpeed loads from a universal checkpoint, before and after a step."""

from collections.abc import Sequence

import pytest

from universal_loads import error_of_resume, resumed
from upstream import affected, newest_affected, with_fix, without_fix

FIX = "universal_all_moments"

AFFECTED = affected(FIX)
NEWEST = newest_affected(FIX)[1]

AFTER_A_STEP = ("--steps", "1")
# An upstream bug: at stages 1 and 2 this release fails in a training step if a rank owns nothing of a group.
TWO_GROUPS = "0.13.2"
OTHER_GROUPS = {"w1.bias", "ln.weight", "ln.bias", "w2.bias", "scale"}


def small(version: str) -> bool:
    """Whether to train three groups, one without elements on some rank, instead of two."""
    return version != TWO_GROUPS


@without_fix(AFFECTED)
def test_upstream_dies_before_a_step(version: str, delivery: str) -> None:
    error = error_of_resume(version, small=small(version))
    assert "in get_optim_state_keys" in error
    assert "AttributeError: 'NoneType' object has no attribute 'keys'" in error


@without_fix(AFFECTED)
def test_upstream_loads_the_first_groups_moments_after_a_step(version: str, delivery: str) -> None:
    """Upstream silently loads only the first group's moments, and is one step ahead."""
    for kind, found in resumed(version, delivery, *AFTER_A_STEP, small=small(version)).items():
        moments = {name for name in found["loaded"] if ".exp_avg" in name}
        expected = set() if kind == "bf16_optimizer" else OTHER_GROUPS  # it steps all groups at once
        assert {name.rpartition(".")[0] for name in moments} == expected
        assert set(found["loaded"]) - moments == {
            f"group {number}.steps" for number in range(3 if small(version) else 2)
        }
        assert found["losses"] != found["expected"]


@with_fix(AFFECTED)
@pytest.mark.parametrize("options", [(), AFTER_A_STEP], ids=["before a step", "after a step"])
def test_loads_all_that_was_saved(version: str, delivery: str, options: Sequence[str]) -> None:
    """The load is bit-equal, with all ranks' steps, and the next two losses equal the uninterrupted run's."""
    for found in resumed(version, delivery, *options, small=small(version)).values():
        assert found["loaded"] == found["loaded again"] == []
        assert found["masters are"] == ["fp32"]
        assert found["unlinked"] == found["unlinked after a step"] == {}
        assert found["losses"] == found["expected"]


@pytest.mark.slow
def test_without_the_other_fixes() -> None:
    """The fix works alone: it creates the links that the load needs."""
    found = resumed(NEWEST, "hook", *AFTER_A_STEP, small=small(NEWEST), fixes=[FIX, "torch_load_weights_only"])
    assert all(result["loaded"] == result["loaded again"] == [] for result in found.values())
    assert all(result["losses"] == result["expected"] for result in found.values())
