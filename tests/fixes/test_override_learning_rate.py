"""override_learning_rate: with the flag the real megatron-core resumes at the run's own rates."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import edits
from megatron.patches.override_learning_rate import OptimizerParamScheduler
from test_resume_param_groups import WITH_COLLISIONS, Run, differences, programs
from upstream import affected, newest_affected, numbers, tree, with_fix, without_fix

FIX = "override_learning_rate"
SCHEDULER = "megatron.core.optimizer_param_scheduler"
AFFECTED = affected(FIX)
NEWEST = newest_affected(FIX)[1]

OVERRIDE, CHECKPOINT = {"keep": "override"}, {"keep": "checkpoint"}
NEW = {"lr": 5e-4, "min_lr": 1e-5}
# Options of the run that saves, and of the one that resumes.
RUNS: dict[str, tuple[Run, Run]] = {
    "lr": ({}, NEW),
    "weight_decay": ({}, {"weight_decay": [0.2, 0.2]}),
    "rising_weight_decay": ({"weight_decay": [0.0, 0.1]}, {**NEW, "weight_decay": [0.1, 0.3]}),
    "decoupled": ({"decoupled_lr": 1e-4}, {**NEW, "decoupled_lr": 2e-5}),
    "decoupled_alone": ({"decoupled_lr": 1e-4}, {"decoupled_lr": 2e-4}),
    # The new rate equals the embedding's old one.
    "exchanged": ({"decoupled_lr": 1e-4}, {"lr": 1e-4, "decoupled_lr": 1e-5}),
}
OF_GROUPS: dict[str, tuple[Run, Run]] = {
    "group_weight_decay": ({"group_weight_decay": 0.3}, {"group_weight_decay": 0.4}),
    "mup": ({"mup": True}, {**NEW, "mup": True}),
}


def runs_for(version: str) -> dict[str, tuple[Run, Run]]:
    with_mup = numbers(version) >= (0, 18)
    return {**RUNS, **(OF_GROUPS if with_mup else {})}


def resumes(version: str, delivery: str, folder: Path, keep: dict[str, str], **more: Any) -> dict[str, list[str]]:
    """By case, a resume's differences from a complete run with its options (override) or the saved run."""
    saves, loads, trains = [], [], []
    names = list(runs_for(version))
    for name, (saved_with, resumed_with) in runs_for(version).items():
        saves.append({"do": "save", "name": name, **saved_with})
        loads.append({"do": "load", "name": name, **resumed_with, **keep, **more})
        trains.append({"do": "train", **resumed_with})
    found = programs(version, delivery, folder, [*saves, *loads, *trains])
    saved, loaded, trained = (found[start : start + len(names)] for start in (0, len(names), 2 * len(names)))
    right = trained if keep == OVERRIDE else saved
    return {name: differences(*pair) for name, *pair in zip(names, right, loaded, strict=True)}


@without_fix(AFFECTED)
def test_upstream_stays_at_the_learning_rate_of_the_checkpoint_or_dies(
    version: str, delivery: str, tmp_path: Path
) -> None:
    found = resumes(version, delivery, tmp_path, OVERRIDE)
    assert found["weight_decay"] == []  # set by the scheduler, and by no group
    if numbers(version) >= (0, 19):
        assert found["lr"] == ["KeyError: (None, 0.0005, 1e-05, None, None, 1.0, 1.0, False, False)"]
    else:
        assert found["lr"] == [
            f"0/{names}/{moment}"
            for moment in ("now", "end")
            for names in ("a.weight,c.weight", "b.weight,b.bias,c.bias")
        ]


@with_fix(AFFECTED)
def test_every_group_goes_on_at_the_rates_of_the_run(version: str, delivery: str, tmp_path: Path) -> None:
    assert resumes(version, delivery, tmp_path, OVERRIDE) == {name: [] for name in runs_for(version)}


@pytest.mark.parametrize("version", ["0.12.0", NEWEST])
def test_the_checkpoint_holds_where_it_is_asked_for(version: str, tmp_path: Path) -> None:
    assert resumes(version, "hook", tmp_path, CHECKPOINT) == {name: [] for name in runs_for(version)}


def test_with_neither_flag_another_decoupled_rate_alone_is_a_warning(tmp_path: Path) -> None:
    """The checkpoint's rate stays, as the scheduler has none to compare, with a warning."""
    runs: list[Run] = [
        {"do": "save", "name": "x", "decoupled_lr": 1e-4},
        {"do": "load", "name": "x", "decoupled_lr": 2e-4},
    ]
    saved, loaded = programs(NEWEST, "hook", tmp_path, runs)
    assert differences(saved, loaded) == []
    (warning,) = loaded[0]["warnings"]
    assert "max_lr 0.0002" in warning.partition("resumes with")[0]


def test_each_group_keeps_its_own_where_all_are_told_global_bounds(tmp_path: Path) -> None:
    """Groups keep their bounds if all get global ones after a load, as in Megatron-LM d98e8a64dd (2026-08-22)."""
    found = resumes(NEWEST, "hook", tmp_path, OVERRIDE, bounds_of_all=3e-4)
    assert found == {name: [] for name in runs_for(NEWEST)}


def test_what_an_overriding_resume_saves_is_the_runs_own(tmp_path: Path) -> None:
    """A run without fix and flag resumes that save; the fix also corrects a save without it."""
    new: Run = {"do": "load", **NEW}
    saves: list[Run] = [{"do": "save", "name": "x"}, {**new, "name": "x", "resave": "y", **OVERRIDE}]
    with_fix, without = tmp_path / "with", tmp_path / "without"
    _, overridden = programs(WITH_COLLISIONS, "hook", with_fix, saves)
    (resumed,) = programs(WITH_COLLISIONS, "none", with_fix, [{**new, "name": "y"}])
    assert differences(overridden, resumed) == []

    programs(WITH_COLLISIONS, "none", without, saves)
    # The scheduler has the new rate there, and the groups the old one.
    still, healed = (
        programs(WITH_COLLISIONS, delivery, without, [{**new, "name": "y", **keep}])[0]
        for delivery, keep in (("none", {}), ("hook", OVERRIDE))
    )
    assert differences(overridden, healed) == []
    assert len(differences(overridden, still)) == 4


def test_rates_that_an_unpatched_resume_has_mixed_up_are_put_right(tmp_path: Path) -> None:
    decoupled = {"decoupled_lr": 1e-4}
    runs: list[Run] = [
        {"do": "save", "name": "x", **decoupled},
        {"do": "load", "name": "x", "resave": "y", **decoupled},
    ]
    saved, damaged = programs(WITH_COLLISIONS, "none", tmp_path, runs)
    assert differences(saved, damaged) == ["0/c.weight/now", "0/c.weight/end"]
    for version in (WITH_COLLISIONS, NEWEST):
        (loaded,) = programs(version, "hook", tmp_path, [{"do": "load", "name": "y", **decoupled, **OVERRIDE}])
        assert differences(saved, loaded) == []


@pytest.mark.slow
def test_where_the_scheduler_is_loaded_first_the_rates_are_right_from_its_next_step_on(tmp_path: Path) -> None:
    found = resumes(NEWEST, "hook", tmp_path, OVERRIDE, scheduler_first=True)
    assert {key.rpartition("/")[2] for wrong in found.values() for key in wrong} == {"now"}


def test_a_run_without_a_load_may_change_the_bounds_of_a_group(tmp_path: Path) -> None:
    train = {"do": "train", **OVERRIDE}
    plain, changed = programs(NEWEST, "hook", tmp_path, [train, {**train, "bounds_of_all": 3e-4}])
    assert len(differences(plain, changed)) == 4


def test_a_group_that_the_scheduler_was_not_made_with_is_told() -> None:
    scheduler = OptimizerParamScheduler()
    scheduler.own_bounds = [{"max_lr": 1.0}]
    scheduler.optimizer = SimpleNamespace(param_groups=[{"max_lr": 2.0}, {"max_lr": 3.0}])
    with pytest.raises(AssertionError, match="expected the 1 param groups that the scheduler was made with, found 2"):
        scheduler._restore_own_bounds()
    assert scheduler.optimizer.param_groups == [{"max_lr": 2.0}, {"max_lr": 3.0}]


def test_upstreams_own_fix_is_there_already(tmp_path: Path) -> None:
    """Megatron-LM#5213, on a side branch, is recognized by its method and the step's position."""
    copy = edits.copy_of(tree("megatron-core", NEWEST), FIX, tmp_path)
    edits.rewrite(copy, SCHEDULER, "        self.step(increment=num_steps)\n", "")
    last = '"weight decay incr style"\n            )\n'
    theirs = "        self._restore_param_group_scheduler_overrides()\n        self.step(increment=num_steps)\n"
    method = "\n    def _restore_param_group_scheduler_overrides(self):\n        pass\n"
    edits.rewrite(copy, SCHEDULER, last, last + theirs + method)
    edits.check_not_needed(copy, FIX)
