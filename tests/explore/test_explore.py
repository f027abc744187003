"""Tests of the explorer: its drawn cases and its corpus are right, and its judge detects errors."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from changed_elements import change_elements
from ckpt_patches.audit.audit import WHOLE, Report, audit
from ckpt_patches.audit.repair.repair import repair
from ckpt_patches.engine.fix import load as fix_named
from ckpt_patches.formats import damages
from ckpt_patches.formats.checkpoint import EXP_AVG
from ckpt_patches.migrate.migrate import Options, migrate
from explore import tools
from explore.corpus import kept
from explore.judged import LOUD, RIGHT, SILENT, Harm, Outcome, Stack, Tried, of_load, outcome
from explore.search import shrunk
from explore.spaces import SPACES, complete, plainer, space_of
from registered import FIXES
from upstream import newest, newest_affected

Case = dict[str, Any]

pytestmark = pytest.mark.slow

CORPUS = kept()
NEWEST = {package: Stack(package, newest(space.distribution)) for package, space in SPACES.items()}
# The numbers of drawn cases that a run can resume.
SAMPLE = {"deepspeed": (3, 6, 9, 12, 14, 15, 18, 19, 20, 22, 31, 32, 38, 41, 42), "megatron": (1, 2, 4, 8, 10)}
TOOLS = ("audit", "fingerprint")
IN_CI = pytest.mark.slow  # of the corpus, each sixteenth
SMALL = {
    "deepspeed": complete(
        {"package": "deepspeed", "ranks": 2, "nodes": 1, "run": {}, "load": {"ranks": 2, "nodes": 1}}
    ),
    "megatron": complete({"package": "megatron", "ranks": 2, "run": {}, "load": {"ranks": 2}}),
}


def drawn(package: str, seed: str) -> Case:
    return SPACES[package].drawn(seed, NEWEST[package].version)


@pytest.mark.parametrize(("package", "number"), [(package, n) for package, numbers in SAMPLE.items() for n in numbers])
def test_a_drawn_case_is_right(package: str, number: int) -> None:
    case = drawn(package, f"sample-{number}")
    found = outcome(case, NEWEST[package])
    assert found.kind == RIGHT, f"{found}: {found.detail}\n{space_of(case).described(case)}"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=IN_CI if n % 16 == 0 else pytest.mark.exhaustive) for n, name in enumerate(CORPUS)],
)
def test_what_was_found_is_right_with_the_fixes_and_silent_or_loud_without_one(name: str) -> None:
    """Each case needs the fix in its name, with what is `off` for both. A case with a tool in its name is right."""
    known, fix = CORPUS[name], name.partition("-")[0]
    case, off = known["case"], known.get("off", "")
    if fix in TOOLS:
        assert outcome(case, Stack(case["package"], known["version"], without=off)).kind == RIGHT
        return
    assert fix in FIXES, f"needs a fix, or an error: {known['shows']}"
    version = known.get("version") or newest_affected(fix)[1]
    stacks = [Stack(case["package"], version, without=one) for one in (off, ",".join(filter(None, (off, fix))))]
    with_all, without = (outcome(case, stack) for stack in stacks)
    if "error" in known:
        assert (with_all.kind, without.kind) == (RIGHT, LOUD), f"{with_all}, without: {without}"
        assert known["error"] in without.detail
    else:
        assert fix_named(fix).silent
        assert with_all.kind in (RIGHT, LOUD), with_all.detail
        assert (without.kind, without.signature) == (SILENT, known["signature"])


@pytest.mark.parametrize(
    ("package", "options", "what", "load"),
    [
        ("deepspeed", {"stage": 0}, ".weight", "ordinary"),
        ("deepspeed", {"stage": 1}, ".fp32", "ordinary"),
        ("deepspeed", {"stage": 3}, ".exp_avg_sq", "ordinary"),
        ("megatron", {}, ".fp32", "fully_reshardable"),
        ("megatron", {"optimizer": "whole", "tp": 2}, ".exp_avg_sq", "fully_reshardable"),
        ("megatron", {"offload": 1.0}, ".exp_avg", "fully_reshardable"),
    ],
)
def test_one_element_that_is_wrong_on_one_rank_is_silent(package: str, options: Case, what: str, load: str) -> None:
    case = plainer(SMALL[package], [{"run": options, "load": {"spoil": what, "tp": options.get("tp", 1)}}])
    assert str(outcome(case, NEWEST[package])) == f"SILENT {load}: {what.removeprefix('.')}"


@pytest.mark.parametrize("package", SPACES)
def test_a_rank_that_waits_for_ever_is_silent(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_PATCHES_TEST_PATIENCE", "0.2")
    case = plainer(SMALL[package], [{"load": {"spoil": "hang"}}])
    assert str(outcome(case, NEWEST[package])) == f"SILENT {space_of(case).loaded(case)}: hangs"


@pytest.mark.quick
@pytest.mark.parametrize("package", SPACES)
def test_a_case_is_plain_data_and_the_same_for_a_seed(package: str) -> None:
    for number in range(100):
        case = drawn(package, f"one-{number}")
        assert case == drawn(package, f"one-{number}") == json.loads(json.dumps(case))
        assert case == complete(case)
        assert case["run"].keys() == SPACES[package].plain.keys()
    assert len({space_of(case).described(case) for case in (drawn(package, f"one-{n}") for n in range(100))}) > 95


@pytest.mark.quick
@pytest.mark.parametrize(
    ("package", "needed"),
    [
        ("deepspeed", ("frozen",)),
        ("deepspeed", ("stage", "tied")),
        ("deepspeed", ("optimizer", "groups", "dtype")),
        ("megatron", ("frozen",)),
        ("megatron", ("format", "bucket")),
        ("megatron", ("tp", "gated")),
    ],
)
def test_a_case_shrinks_to_what_it_needs(
    package: str, needed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case shrinks to the options that a stub judge needs. The test uses the drawn cases that have all of them."""
    tried: list[Case] = []
    plain, stack = SPACES[package].plain, NEWEST[package]

    def found(case: Case, stack: Stack) -> Outcome:
        tried.append(case)
        shows = all(case["run"][name] != plain[name] for name in needed)
        return Outcome(SILENT, signature="it") if shows else Outcome(RIGHT)

    monkeypatch.setattr("explore.search.outcome", found)
    for case in (drawn(package, f"two-{number}") for number in range(100)):
        if found(case, stack).kind == SILENT:
            tried.clear()
            small, last = shrunk(case, found(case, stack), stack)
            assert last.kind == SILENT
            assert {name for name in plain if small["run"][name] != plain[name]} == set(needed)
            ranks = small["run"].get("tp", 1)
            assert (small["ranks"], small["load"]["ranks"], small["two_saves"]) == (ranks, ranks, False)
            steps = space_of(small).steps_to_plain(small)
            assert not any(found(plainer(small, [step]), stack).kind == SILENT for step in steps)
            assert len(tried) < 60


# The judge of the tools: each test spoils one tool in one way, and the case is SILENT.


def test_an_audit_that_calls_a_whole_checkpoint_damaged_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(path: Path, workers: int) -> Report:
        report = audit(path, workers)
        return replace(report, findings=(*report.findings, damages.Finding(damages.NOT_FINITE, "an array")))

    monkeypatch.setattr("explore.tools.audit", spoiled)
    assert str(outcome(SMALL["deepspeed"], NEWEST["deepspeed"])) == "SILENT audit of a whole checkpoint: not_finite"


def test_an_audit_that_calls_a_truncated_checkpoint_whole_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("explore.tools.verdict", lambda tag: WHOLE)
    case = plainer(SMALL["deepspeed"], [{"load": {"damage": "truncated"}}])
    assert str(outcome(case, NEWEST["deepspeed"])).startswith("SILENT audit: WHOLE in spite of ")


def test_a_repair_of_a_whole_checkpoint_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("explore.tools.repair", lambda *_: "repaired")
    assert str(outcome(SMALL["deepspeed"], NEWEST["deepspeed"])) == "SILENT repair of a whole checkpoint"


def test_a_repair_that_leaves_other_elements_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repair of a main parameter that also changes moments is silent."""

    def spoiled(path: Path, output: Path, older: Path | None, workers: int, *, reset_moments: bool) -> Any:
        result = repair(path, output, older, workers, reset_moments=reset_moments)
        change_a_moment(output)
        return result

    case = plainer(SMALL["deepspeed"], [{"load": {"damage": "zeros", "file": 1, "repaired": True}}])
    assert outcome(case, NEWEST["deepspeed"]).kind == RIGHT
    monkeypatch.setattr("explore.tools.repair", spoiled)
    found = outcome(case, NEWEST["deepspeed"])
    assert found.kind == SILENT
    assert "a repaired part" in found.signature


def test_a_converter_that_writes_another_element_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    to_universal = tools.to_universal

    def spoiled(tag: Path, output: Path, release: Path) -> str:
        error = to_universal(tag, output, release)
        file = next(output.glob("zero/*/exp_avg.pt"))
        state = torch.load(file)
        state["param"].view(-1)[0] += 1
        torch.save(state, file)
        return error

    monkeypatch.setattr("explore.tools.to_universal", spoiled)
    case = plainer(SMALL["deepspeed"], [{"load": {"kind": "universal", "both_converters": True}}])
    assert str(outcome(case, NEWEST["deepspeed"])) == "SILENT the two converters: exp_avg param"
    alone = plainer(case, [{"load": {"both_converters": False}}])
    assert str(outcome(alone, NEWEST["deepspeed"])) == "SILENT universal: exp_avg"


def test_a_migration_that_writes_another_element_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(old: Path, new: Path, options: Options, **more: Any) -> None:
        migrate(old, new, options, **more)
        change_a_moment(new)

    monkeypatch.setattr("explore.tools.migrate", spoiled)
    run = {"format": "fully_sharded_model_space"}
    load = {"saved_by": "0.14.0", "migrated": True, "format": "fully_reshardable"}
    found = outcome(plainer(SMALL["megatron"], [{"run": run, "load": load}]), NEWEST["megatron"])
    assert found.kind == SILENT


@pytest.mark.quick
@pytest.mark.parametrize(
    ("lines", "different", "signature"),
    [
        (["resume differs"], [], "fingerprints differ, and no state does"),
        ([], [], "a right load is not verified"),
        (["resume verified: 3 states"], ["a.exp_avg"], "exp_avg"),
    ],
)
def test_a_fingerprint_that_is_wrong_is_silent(
    lines: list[str], different: list[str], signature: str, tmp_path: Path
) -> None:
    stack = replace(NEWEST["deepspeed"], fingerprint=True)
    tried = Tried(SMALL["deepspeed"], stack, stack, tmp_path, Harm())
    found = of_load(tried, {"proof": lines, "different": different}, tmp_path)
    assert str(found) == f"SILENT ordinary: {signature}"


def change_a_moment(checkpoint: Path) -> None:
    """Flip the lowest bit of a moment in the checkpoint."""
    found = audit(checkpoint, 1).checkpoint
    shard = next(shard for shard in found.shards if EXP_AVG in shard.streams)
    change_elements(found, shard, EXP_AVG, 0, lambda bits: bits ^ 1)
