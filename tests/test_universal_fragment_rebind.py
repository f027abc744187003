"""universal_fragment_rebind: what the real DeepSpeed takes for a parameter's master after a universal load."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import edits
import universal_loads
from ckpt_patches.engine.plan import Outcome
from universal_loads import MASTERS, MOMENTS, ON_MAIN
from upstream import DELIVERIES, releases, tree

FIX = "universal_fragment_rebind"

AFFECTED = [*releases("deepspeed", oldest="0.14.1", newest="0.19.6"), *ON_MAIN]  # main at edaa722126, of before 0.19.7


@functools.cache
def resumed(version: str, delivery: str) -> dict[str, dict[str, Any]]:
    return universal_loads.resumed(version, delivery)


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", ["none"])
@pytest.mark.parametrize("version", AFFECTED)
def test_upstream_takes_a_moment_for_the_master(version: str, delivery: str) -> None:
    """The load itself is right; what is asked for, set, or loaded again after it is another tensor."""
    for found in resumed(version, delivery).values():
        assert found["loaded"] == []
        (taken,) = found["masters are"]
        assert taken in MOMENTS  # either: it is the last of a set
        assert found["overwritten"] == [f"w1.weight.{taken}"]
        masters = [name for name in found["loaded again"] if name.endswith(".fp32")]
        assert MASTERS in masters
        assert len(masters) == 7
        assert found["losses"] != found["expected"]


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", AFFECTED)
def test_the_master_is_taken_for_the_master(version: str, delivery: str) -> None:
    """And a second load is right, bit for bit, as are the next two losses."""
    for found in resumed(version, delivery).values():
        assert found["loaded"] == []
        assert found["masters are"] == ["fp32"]
        assert found["unlinked"] == found["unlinked after a step"] == {}
        assert found["overwritten"] == [MASTERS]
        assert found["loaded again"] == []
        assert found["losses"] == found["expected"]


# The edit itself

TENSOR_FRAGMENT = "deepspeed.utils.tensor_fragment"
REBIND = "lp._hp_mapping.hp_fragment = hp_fragment"
ADDED = "lp._hp_mapping.optim_fragment[key] = hp_fragment"


@pytest.mark.parametrize("version", AFFECTED)
def test_what_is_added(version: str) -> None:
    edits.check_added(version, FIX, {"tensor_fragment": [ADDED]})


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", releases("deepspeed", oldest="0.19.7", newest="0.19.8"))
def test_fixed_upstream(version: str, delivery: str, record_property: Callable[[str, object], None]) -> None:
    edits.check_fixed_upstream(version, FIX, record_property)


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", releases("deepspeed", newest="0.14.0"))
def test_a_release_that_loads_moments_in_place_is_not_concerned(
    version: str, delivery: str, record_property: Callable[[str, object], None]
) -> None:
    edits.check_not_present(version, FIX, record_property)


@pytest.fixture(params=["0.16.2", "0.19.2"])
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return edits.copy_of(tree("deepspeed", request.param), FIX, tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (REBIND, "lp._hp_mapping.rebind(hp_fragment)"),
        (REBIND, f"{REBIND}\n                {REBIND}"),
    ],
)
def test_unknown_code_is_left_alone(copy: Path, old: str, new: str) -> None:
    reason = edits.check_left_alone(copy, FIX, TENSOR_FRAGMENT, old, new)
    assert "tensor_fragment.py: expected" in reason


def test_anchor_in_a_comment_or_a_string_is_none(copy: Path) -> None:
    signature = "def map_to_flat_opt_states(flat_hp_tensor, lp_tensors, optim_state, opt_keys):\n"
    edits.rewrite(copy, TENSOR_FRAGMENT, signature, f'{signature}    """{REBIND}"""  # {REBIND}\n')
    result, plan = edits.plan(copy, FIX)
    assert result.outcome is Outcome.APPLIES
    assert edits.added_lines(plan) == {"tensor_fragment": [ADDED]}
