"""The explorer: cases that it draws, those that it has found, and that its judge can say no."""

import json
from typing import Any

import pytest

from ckpt_patches.engine.fix import load
from explore.corpus import kept
from explore.deepspeed_space import PLAIN, complete, described, drawn, plainer, steps_to_plain
from explore.judged import LOUD, RIGHT, SILENT, Outcome, Stack, outcome
from explore.search import shrunk
from upstream import newest, newest_affected

CORPUS = kept()
SAMPLE = [
    f"sample-{number}" for number in (3, 6, 9, 10, 12, 14, 15, 18, 19, 20, 21, 22, 31, 32, 38)
]  # which can be resumed
NEWEST = Stack(newest("deepspeed"))
SMALL = complete({"package": "deepspeed", "ranks": 2, "nodes": 1, "run": {}, "load": {"ranks": 2, "nodes": 1}})


@pytest.mark.parametrize("seed", SAMPLE)
def test_a_drawn_case_is_right(seed: str) -> None:
    found = outcome(drawn(seed), NEWEST)
    assert found.kind == RIGHT, f"{found}: {found.detail}\n{described(drawn(seed))}"


@pytest.mark.long
@pytest.mark.parametrize("name", CORPUS)
def test_what_was_found_is_right_with_the_fixes_and_silent_without_one(name: str) -> None:
    """A case of the corpus is named after the fix that it needs."""
    known, fix = CORPUS[name], name.partition("-")[0]
    version = known.get("version", newest_affected(fix)[1])
    assert load(fix).silent
    with_all, without = (outcome(known["case"], Stack(version, without=one)) for one in ("", fix))
    assert with_all.kind in (RIGHT, LOUD), with_all.detail
    assert (without.kind, without.signature) == (SILENT, known["signature"])


@pytest.mark.parametrize(("stage", "what"), [(0, ".weight"), (1, ".fp32"), (3, ".exp_avg_sq")])
def test_one_element_that_is_wrong_on_one_rank_is_silent(stage: int, what: str) -> None:
    case = plainer(SMALL, [{"run": {"stage": stage}, "load": {"spoil": what}}])
    assert str(outcome(case, NEWEST)) == f"SILENT ordinary: {what.removeprefix('.')}"


def test_a_rank_that_waits_for_ever_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_PATCHES_TEST_PATIENCE", "0.2")
    case = plainer(SMALL, [{"load": {"spoil": "hang"}}])
    assert str(outcome(case, NEWEST)) == "SILENT ordinary: hangs"


@pytest.mark.quick
def test_a_case_is_plain_data_and_the_same_for_a_seed() -> None:
    for number in range(100):
        case = drawn(f"one-{number}")
        assert case == drawn(f"one-{number}") == json.loads(json.dumps(case))
        assert case == complete(case)
        assert case["run"].keys() == PLAIN.keys()
    assert len({described(drawn(f"one-{number}")) for number in range(100)}) > 95


@pytest.mark.quick
@pytest.mark.parametrize("needed", [("frozen",), ("stage", "tied"), ("optimizer", "groups", "dtype")])
def test_a_case_shrinks_to_what_it_needs(needed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a judge that looks at some options alone; of 100 cases those that have all of them."""
    tried: list[dict[str, Any]] = []

    def found(case: dict[str, Any], stack: Stack) -> Outcome:
        tried.append(case)
        shows = all(case["run"][name] != PLAIN[name] for name in needed)
        return Outcome(SILENT, signature="it") if shows else Outcome(RIGHT)

    monkeypatch.setattr("explore.search.outcome", found)
    for case in (drawn(f"two-{number}") for number in range(100)):
        if found(case, NEWEST).kind == SILENT:
            tried.clear()
            small, last = shrunk(case, found(case, NEWEST), NEWEST)
            assert last.kind == SILENT
            assert {name for name in PLAIN if small["run"][name] != PLAIN[name]} == set(needed)
            assert (small["ranks"], small["load"]["ranks"], small["two_saves"]) == (1, 1, False)
            assert not any(found(plainer(small, [step]), NEWEST).kind == SILENT for step in steps_to_plain(small))
            assert len(tried) < 60
