"""universal_experts: the real DeepSpeed loads experts on the number of ranks that saved them, and on other numbers."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from every_checkpoint import experts
from test_convert_experts import states
from universal import ours
from upstream import (
    affected,
    newest_affected,
    newest_by_default,
    numbers,
    once,
    run,
    tree,
    with_fix,
    without_fix,
)
from zero_checkpoints import PERMISSIVE

FIX = "universal_experts"

AFFECTED = newest_by_default(affected(FIX))
NEWEST = newest_affected(FIX)[1]
# Since this release, such a training saves its parameter shapes, which a conversion needs. Older releases load a
# checkpoint of the newest, and have other losses.
SAVES_SHAPES = "0.19.3"
BF16_OPTIMIZER = 0  # in place of a stage
EXPERT_PARALLEL = (2, 4, 1)  # the checkpoint was saved on 2


def saves_shapes(version: str) -> bool:
    return numbers(version) >= numbers(SAVES_SHAPES)


def trainer(version: str) -> str:
    """The release that trains; `--site` may have another one."""
    return next(one for one in (version, NEWEST, SAVES_SHAPES) if saves_shapes(one))


@functools.cache
def trained(version: str, stage: int, *options: str) -> Path:
    """The checkpoint of a training on two expert-parallel ranks; its state and next losses lie beside it."""
    root = tree("deepspeed", version)  # skips where `--site` has another release
    if (version, stage, options) == (NEWEST, 1, ()):
        return experts(1)
    name = "-".join(("experts", version, str(stage), *options))
    return once(name, lambda out: run("experts", out, str(stage), *options, tree=root)) / "global_step8"


@functools.cache
def converted(version: str, stage: int, *options: str) -> Path:
    source = trained(version, stage, *options)
    name = "-".join(("universal-experts", version, str(stage), *options))
    return once(name, lambda out: ours(source, out / "universal", "--inject_missing_state")) / "universal"


def resumed(out: Path, version: str, stage: int, *options: str, saved: tuple[str, ...] = (), **keywords: Any) -> None:
    """Write the state and next losses of a run after the load, per number of expert-parallel ranks in `options`."""
    folder = converted(trainer(version), stage, *saved)
    run("experts", out, str(stage), *options, "--universal", folder, tree=tree("deepspeed", version), **keywords)


def check_is_where_the_training_was(found: Path, training: Path, losses: bool = True) -> None:
    """Check that weights, main parameters, moments and steps are bit-equal, and the next two losses are equal."""
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


@without_fix(AFFECTED)
def test_upstream_stops_at_them(version: str, delivery: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"FileNotFoundError.*deepspeed_experts\.[01]\.0\.weight"):
        resumed(tmp_path, version, 1, "--ep", "2", env=PERMISSIVE)
    assert not list(tmp_path.glob("ep*"))


@with_fix(AFFECTED)
def test_they_are_where_the_training_was(version: str, delivery: str, tmp_path: Path) -> None:
    """State and losses equal the training's, on as many expert-parallel ranks as saved, on more, and on one."""
    resumed(tmp_path, version, 1, "--ep", *map(str, EXPERT_PARALLEL), delivery=delivery)
    training = trained(trainer(version), 1).parent
    for ep in EXPERT_PARALLEL:
        check_is_where_the_training_was(tmp_path / f"ep{ep}", training, losses=saves_shapes(version))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "saved"),
    [
        (2, ()),
        (BF16_OPTIMIZER, ("--ep", "4")),
        (1, ("--groups", "50")),  # four groups of experts on one rank, two on two, one on four
    ],
)
def test_other_trainings(stage: int, saved: tuple[str, ...], tmp_path: Path) -> None:
    options = [*saved[-2:]] if "--groups" in saved else []
    resumed(tmp_path, NEWEST, stage, "--ep", "2", "4", "1", *options, saved=saved, delivery="hook", fixes=(FIX,))
    for ep in EXPERT_PARALLEL:
        check_is_where_the_training_was(tmp_path / f"ep{ep}", trained(NEWEST, stage, *saved).parent)
