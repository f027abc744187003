"""Tests of the explorer: its drawn cases and its corpus are right, and its judge detects errors."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from changed_elements import change_elements
from ckpt_patches.audit.audit import WHOLE, audit
from ckpt_patches.audit.repair.repair import repair
from ckpt_patches.engine.fix import load as fix_named
from ckpt_patches.formats import damages
from ckpt_patches.formats.checkpoint import EXP_AVG
from ckpt_patches.migrate.migrate import migrate
from explore import tools
from explore.corpus import causes, kept
from explore.judged import LOUD, RIGHT, SILENT, Harm, Outcome, Stack, Tried, of_load, outcome
from explore.search import Exploration, shrunk
from explore.spaces import SPACES, complete, described, plainer, space_of, steps_to_plain
from registered import FIXES
from upstream import newest, newest_affected

Case = dict[str, Any]

pytestmark = pytest.mark.slow

CORPUS = kept()
NEWEST = {package: Stack(package, newest(space.DISTRIBUTION)) for package, space in SPACES.items()}
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
    case: Case = SPACES[package].drawn(seed, NEWEST[package].version)
    return case


def small(package: str, **load: Any) -> Outcome:
    """The outcome of a small case with these options of the load; `run` has those of the run."""
    run = load.pop("run", {})
    return outcome(plainer(SMALL[package], [{"run": run, "load": load}]), NEWEST[package])


@pytest.mark.parametrize(("package", "number"), [(package, n) for package, numbers in SAMPLE.items() for n in numbers])
def test_a_drawn_case_is_right(package: str, number: int) -> None:
    case = drawn(package, f"sample-{number}")
    found = outcome(case, NEWEST[package])
    assert found.kind == RIGHT, f"{found}: {found.detail}\n{described(case)}"


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
        ("megatron", {"optimizer": "whole", "tp": 2}, ".exp_avg_sq", "fully_reshardable"),
        ("megatron", {"offload": 1.0}, ".exp_avg", "fully_reshardable"),
    ],
)
def test_one_element_that_is_wrong_on_one_rank_is_silent(package: str, options: Case, what: str, load: str) -> None:
    found = small(package, run=options, spoil=what, tp=options.get("tp", 1))
    assert str(found) == f"SILENT {load}: {what.removeprefix('.')}"


@pytest.mark.parametrize("package", SPACES)
def test_a_rank_that_waits_for_ever_is_silent(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_PATCHES_TEST_PATIENCE", "0.2")
    assert str(small(package, spoil="hang")) == f"SILENT {space_of(SMALL[package]).loaded(SMALL[package])}: hangs"


@pytest.mark.quick
@pytest.mark.parametrize("package", SPACES)
def test_a_case_is_plain_data_and_the_same_for_a_seed(package: str) -> None:
    for number in range(100):
        case = drawn(package, f"one-{number}")
        assert case == drawn(package, f"one-{number}") == json.loads(json.dumps(case))
        assert case == complete(case)
        assert case["run"].keys() == SPACES[package].PLAIN.keys()
    assert len({described(drawn(package, f"one-{n}")) for n in range(100)}) > 95


@pytest.mark.quick
@pytest.mark.parametrize(
    ("package", "needed"),
    [
        ("deepspeed", ("frozen",)),
        ("deepspeed", ("optimizer", "groups", "dtype")),
        ("megatron", ("format", "bucket")),
        ("megatron", ("tp", "gated")),
    ],
)
def test_a_case_shrinks_to_what_it_needs(
    package: str, needed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case shrinks to the options that a stub judge needs. The test uses the drawn cases that have all of them."""
    tried: list[Case] = []
    plain, stack = SPACES[package].PLAIN, NEWEST[package]

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
            steps = steps_to_plain(small)
            assert not any(found(plainer(small, [step]), stack).kind == SILENT for step in steps)
            assert len(tried) < 60


@pytest.mark.quick
@pytest.mark.parametrize("needed", ["", "a", "h", "bg", "cde", "abcdefgh"])
def test_the_causes_are_the_fixes_without_which_a_case_is_silent(needed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(case: Case, stack: Stack) -> Outcome:
        return Outcome(SILENT if {*needed} <= {*stack.without} else RIGHT)

    monkeypatch.setattr("explore.corpus.outcome", found)
    assert sorted(causes({}, replace(NEWEST["deepspeed"], without="a,b,c,d,e,f,g,h"))) == [*needed]


def test_a_bug_is_found_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the fixes off a bug is found, named by its fix, and not found again."""
    monkeypatch.setattr(SPACES["deepspeed"], "drawn", lambda *_: copy.deepcopy(CORPUS["zero3_module_only"]["case"]))
    exploration = Exploration(tmp_path / "state.json", "seed", replace(NEWEST["deepspeed"], fixes=False))
    for name in ("first", "second"):
        exploration.take(name)
    assert exploration.found == json.loads((tmp_path / "state.json").read_text())["found"] == ["zero3_module_only"]
    assert (exploration.counts[SILENT], exploration.counts[RIGHT]) == (1, 1)
    assert capsys.readouterr().out.strip().endswith("| without zero3_module_only")


# The judge of the tools: each tool is spoiled in one way, and the case is SILENT.


def change_a_moment(checkpoint: Path) -> None:
    """Flip the lowest bit of a moment in the checkpoint."""
    found = audit(checkpoint, 1).checkpoint
    shard = next(shard for shard in found.shards if EXP_AVG in shard.streams)
    change_elements(found, shard, EXP_AVG, 0, lambda bits: bits ^ 1)


def audit_that_finds_damage(path: Path, workers: int) -> Any:
    report = audit(path, workers)
    return replace(report, findings=(*report.findings, damages.Finding(damages.NOT_FINITE, "an array")))


def repair_that_changes_moments(path: Path, output: Path, *arguments: Any, **options: Any) -> Any:
    result = repair(path, output, *arguments, **options)
    change_a_moment(output)
    return result


def conversion_that_adds_one(tag: Path, output: Path, release: Path, convert: Any = tools.to_universal) -> Any:
    error = convert(tag, output, release)
    file = next(output.glob("zero/*/exp_avg.pt"))
    state = torch.load(file)
    state["param"].view(-1)[0] += 1
    torch.save(state, file)
    return error


def migration_that_changes_moments(old: Path, new: Path, *arguments: Any, **more: Any) -> None:
    migrate(old, new, *arguments, **more)
    change_a_moment(new)


REPAIRED: Case = {"damage": "zeros", "file": 1, "repaired": True}
MIGRATED: Case = {
    "run": {"format": "fully_sharded_model_space"},
    "saved_by": "0.14.0",
    "migrated": True,
    "format": "fully_reshardable",
}


@pytest.mark.parametrize(
    ("tool", "spoiled", "package", "load", "expected"),
    [
        ("audit", audit_that_finds_damage, "deepspeed", {}, "audit of a whole checkpoint: not_finite"),
        ("verdict", lambda tag: WHOLE, "deepspeed", {"damage": "truncated"}, "audit: WHOLE in spite of "),
        ("repair", lambda *_: "repaired", "deepspeed", {}, "repair of a whole checkpoint"),
        ("repair", repair_that_changes_moments, "deepspeed", REPAIRED, "ordinary, a repaired part"),
        ("to_universal", conversion_that_adds_one, "deepspeed", {"kind": "universal"}, "universal: exp_avg"),
        (
            "to_universal",
            conversion_that_adds_one,
            "deepspeed",
            {"kind": "universal", "both_converters": True},
            "the two converters: exp_avg param",
        ),
        ("migrate", migration_that_changes_moments, "megatron", MIGRATED, ""),
    ],
)
def test_a_tool_that_is_wrong_is_silent(
    tool: str, spoiled: Callable[..., Any], package: str, load: Case, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"explore.tools.{tool}", spoiled)
    assert str(small(package, **load)).startswith(f"SILENT {expected}")


def test_a_repaired_case_is_right() -> None:
    assert small("deepspeed", **REPAIRED).kind == RIGHT


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
