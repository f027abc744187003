"""universal_fragment_rebind: the tensor that the real DeepSpeed uses as main parameter after a universal load."""

import functools
from typing import Any

import universal_loads
from universal_loads import MASTERS, MOMENTS, ON_MAIN
from upstream import affected, with_fix, without_fix

FIX = "universal_fragment_rebind"

AFFECTED = [*affected(FIX), *ON_MAIN]  # main at edaa722126, before 0.19.7


@functools.cache
def resumed(version: str, delivery: str) -> dict[str, dict[str, Any]]:
    return universal_loads.resumed(version, delivery)


@without_fix(AFFECTED)
def test_upstream_takes_a_moment_for_the_master(version: str, delivery: str) -> None:
    """The load itself is right. Later reads, writes and loads of main parameters use another tensor."""
    for found in resumed(version, delivery).values():
        assert found["loaded"] == []
        (taken,) = found["masters are"]
        assert taken in MOMENTS  # either one: it is the last of a set
        assert found["overwritten"] == [f"w1.weight.{taken}"]
        masters = [name for name in found["loaded again"] if name.endswith(".fp32")]
        assert MASTERS in masters
        assert len(masters) == 7
        assert found["losses"] != found["expected"]


@with_fix(AFFECTED)
def test_the_master_is_taken_for_the_master(version: str, delivery: str) -> None:
    """A second load and the next two losses are right, too, bit for bit."""
    for found in resumed(version, delivery).values():
        assert found["loaded"] == []
        assert found["masters are"] == ["fp32"]
        assert found["unlinked"] == found["unlinked after a step"] == {}
        assert found["overwritten"] == [MASTERS]
        assert found["loaded again"] == []
        assert found["losses"] == found["expected"]
