"""universal_experts: the real DeepSpeed loads experts on the number of ranks that has saved them, and on others."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

import shared
from test_audit_coverage import experts
from test_convert_experts import states
from universal import ours
from upstream import (
    MAIN,
    affected,
    all_releases,
    newest_affected,
    newest_by_default,
    numbers,
    run,
    tree,
    with_fix,
    without_fix,
)
from zero_checkpoints import PERMISSIVE

FIX = "universal_experts"

AFFECTED = newest_by_default(affected(FIX))
NEWEST = newest_affected(FIX)[1]
# Since then such a training saves the shapes of its parameters, without which nothing can be converted. A release
# before that loads what the newest has written, and its losses are its own.
SAVES_SHAPES = "0.19.3"
BF16_OPTIMIZER = 0  # in the place of a stage
EXPERT_PARALLEL = (2, 4, 1)  # those that have saved are 2

more = pytest.mark.skipif(not all_releases(), reason="trainings more: with CKPT_PATCHES_TEST_ALL=1")


def saves_shapes(version: str) -> bool:
    return numbers(version) >= numbers(SAVES_SHAPES)


def trainer(version: str) -> str:
    """A checkout of the main branch says of itself, and in what it saves, that it is older than any release."""
    return version if saves_shapes(version) and version != MAIN else NEWEST


@functools.cache
def trained(version: str, stage: int, *options: str) -> Path:
    """What a training on two expert-parallel ranks has saved; beside it, what it was then and did next."""
    if (version, stage, options) == (NEWEST, 1, ()):
        return experts(1)
    name = "-".join(("experts", version, str(stage), *options))
    root = tree("deepspeed", version)
    return shared.once(name, lambda out: run("experts", out, str(stage), *options, tree=root)) / "global_step8"


@functools.cache
def converted(version: str, stage: int, *options: str) -> Path:
    source = trained(version, stage, *options)
    name = "-".join(("universal-experts", version, str(stage), *options))
    return shared.once(name, lambda out: ours(source, out / "universal", "--inject_missing_state")) / "universal"


def resumed(out: Path, version: str, stage: int, *options: str, saved: tuple[str, ...] = (), **keywords: Any) -> None:
    """Write what a run has after the load, and does next, on each number of expert-parallel ranks in `options`."""
    folder = converted(trainer(version), stage, *saved)
    run("experts", out, str(stage), *options, "--universal", folder, tree=tree("deepspeed", version), **keywords)


def check_is_where_the_training_was(found: Path, training: Path, losses: bool = True) -> None:
    """Weights, masters, moments and steps bit for bit, and the next two losses."""
    expected, loaded = states(training), states(found)
    assert loaded.keys() == expected.keys()
    for name, state in expected.items():
        assert state.keys() == loaded[name].keys()
        assert {"weight", "fp32", "exp_avg", "exp_avg_sq", "step"} <= state.keys()
        assert [key for key in state if not loaded[name][key].equal(state[key])] == [], name
    if losses:
        assert read(found / "losses.json") == read(training / "losses.json")


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@without_fix(FIX, AFFECTED)
def test_upstream_stops_at_them(version: str, delivery: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"FileNotFoundError.*deepspeed_experts\.[01]\.0\.weight"):
        resumed(tmp_path, version, 1, "--ep", "2", env=PERMISSIVE)
    assert not list(tmp_path.glob("ep*"))


@with_fix(FIX, AFFECTED)
def test_they_are_where_the_training_was(version: str, delivery: str, tmp_path: Path) -> None:
    """On the number of expert-parallel ranks that has saved, on more of them, and on one."""
    resumed(tmp_path, version, 1, "--ep", *map(str, EXPERT_PARALLEL), delivery=delivery)
    training = trained(trainer(version), 1).parent
    for ep in EXPERT_PARALLEL:
        check_is_where_the_training_was(tmp_path / f"ep{ep}", training, losses=saves_shapes(version))


@more
@pytest.mark.parametrize(
    ("stage", "saved"),
    [
        (2, ()),
        (BF16_OPTIMIZER, ()),
        (1, ("--ep", "1")),
        (1, ("--ep", "4")),
        (1, ("--groups", "50")),  # on one rank four groups of experts, on two of them two, on four one
    ],
)
def test_other_trainings(stage: int, saved: tuple[str, ...], tmp_path: Path) -> None:
    options = [*saved[-2:]] if "--groups" in saved else []
    resumed(tmp_path, NEWEST, stage, "--ep", "2", "4", "1", *options, saved=saved, delivery="hook", fixes=(FIX,))
    for ep in EXPERT_PARALLEL:
        check_is_where_the_training_was(tmp_path / f"ep{ep}", trained(NEWEST, stage, *saved).parent)


@more
def test_upstream_loads_other_experts_where_one_rank_has_saved(tmp_path: Path) -> None:
    """Silently: each rank takes the first ones."""
    resumed(tmp_path, NEWEST, 1, "--ep", "4", saved=("--ep", "1"))
    expected = states(trained(NEWEST, 1, "--ep", "1").parent)
    found = states(tmp_path / "ep4")
    wrong = {name for name in expected if not found[name]["fp32"].equal(expected[name]["fp32"])}
    experts_of = "experts.deepspeed_moe.experts.deepspeed_experts."
    assert wrong == {name for name in expected if name.startswith(experts_of) and name[len(experts_of)] != "0"}
    assert found[f"{experts_of}3.0.weight"]["fp32"].equal(expected[f"{experts_of}0.0.weight"]["fp32"])


@more
def test_what_an_old_release_has_saved_is_converted_after_a_resume(tmp_path: Path) -> None:
    old = trained("0.16.2", 1)
    refused = ours(old, tmp_path / "old", "--inject_missing_state", check=False)
    assert refused.returncode == 2
    assert "resume on the same ranks with a later one" in refused.stderr
    run("experts", tmp_path / "new", "1", "--resume", old, tree=tree("deepspeed", NEWEST))
    check_is_where_the_training_was(tmp_path / "new", old.parent, losses=False)
    ours(tmp_path / "new/global_step8", tmp_path / "universal", "--inject_missing_state")
