"""universal_fragment_rebind: after a universal load the main parameters are those that were loaded."""

import functools
from pathlib import Path
from typing import Any

import universal_loads
from universal_loads import MASTERS, MOMENTS, ON_MAIN
from upstream import affected, shown, with_fix, without_fix

RELEASES = affected("universal_fragment_rebind")[-1:]


@without_fix(RELEASES)
def test_another_state_is_read_as_the_main_parameter(version: str, delivery: str) -> None:
    assert "parameters, and no error" in shown(__file__, version, delivery)


@with_fix(RELEASES)
def test_the_main_parameters_that_were_loaded_are_read(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


# Further cases

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


# What the ranks run

CASE, RANKS = "stage1-2", 2


def load_and_ask(rank: int, folder: Path) -> str:
    from deepspeed.utils import safe_get_full_fp32_param

    from trainers import deepspeed_training as dt

    dt.train_and_save(rank, folder, CASE, RANKS)
    dt.convert(folder)
    resumed = dt.engine_of(CASE, RANKS, universal=True, seed=1)
    dt.load(resumed, folder, dt.UNIVERSAL)
    live, parameters = dt.state(resumed), dict(resumed.module.named_parameters())
    found = {name: safe_get_full_fp32_param(parameter) for name, parameter in parameters.items()}
    wrong = sum(not found[name].equal(live[name]["fp32"]) for name in found)
    return f"another state for {wrong} of {len(found)} parameters, and no error" if wrong else ""


def bug(folder: Path) -> str:
    from trainers import deepspeed_training as dt

    return str(dt.results(load_and_ask, RANKS, folder)[0])
