"""resume_param_groups: each param group of the real megatron-core resumes with the settings that were saved for it."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import edits
from megatron.patches.resume_param_groups import _pair_param_groups
from upstream import newest_affected, numbers, releases, run_json, tree, with_fix, without_fix

FIX = "resume_param_groups"
VERSIONS = releases("megatron-core")
NEWEST = newest_affected(FIX)[1]
WITH_COLLISIONS = "0.18.2"

Run = dict[str, Any]

# The settings of a saving and a loading run. Each pair resumes with the saved settings.
SAME: dict[str, tuple[Run, Run]] = {
    "plain": ({}, {}),
    "decoupled": ({"decoupled_lr": 1e-4}, {"decoupled_lr": 1e-4}),
    "mup": ({"mup": True}, {"mup": True}),
    "new_lr": ({}, {"lr": 5e-4, "keep": "checkpoint"}),
    "new_lr_decoupled": ({"decoupled_lr": 1e-4}, {"decoupled_lr": 2e-4, "lr": 5e-4, "keep": "checkpoint"}),
    # The new rate equals the embedding's old rate.
    "exchanged": ({"decoupled_lr": 1e-4}, {"decoupled_lr": 1e-5, "lr": 1e-4, "keep": "checkpoint"}),
}


def cases(version: str) -> list[str]:
    return [name for name in SAME if name != "mup" or numbers(version) >= (0, 18)]


def resumes(
    version: str, saved_by: str, loaded_by: str, folder: Path, names: list[str], *options: str, loading: str = ""
) -> dict[str, list[str]]:
    """By case, what does not resume as saved: groups, by rank and parameters, or an error."""
    saves = [{"do": "save", "name": name, **SAME[name][0]} for name in names]
    loads = [{"do": "load", "name": name, **SAME[name][1]} for name in names]
    if (saved_by, loading or version) == (loaded_by, version):
        found = programs(version, saved_by, folder, [*saves, *loads], *options)
        saved, loaded = found[: len(names)], found[len(names) :]
    else:
        saved = programs(version, saved_by, folder, saves, *options)
        loaded = programs(loading or version, loaded_by, folder, loads, *options)
    return {name: differences(*pair) for name, *pair in zip(names, saved, loaded, strict=True)}


def programs(
    version: str, delivery: str, folder: Path, runs: list[Run], *options: str, fixes: Sequence[str] = ()
) -> Any:
    """The findings of each run, by rank, in the format that stores the first rank's groups for all ranks."""
    root = tree("megatron-core", version)
    format_ = "fully_reshardable" if numbers(version) >= (0, 15) else "fully_sharded_model_space"
    of_all = ("--format", format_, *options)
    return run_json("param_groups", folder, *map(json.dumps, runs), *of_all, tree=root, delivery=delivery, fixes=fixes)


def differences(saved: list[Any], loaded: list[Any]) -> list[str]:
    assert not [found["error"] for found in saved if "error" in found]
    wrong = []
    for rank, (right, found) in enumerate(zip(saved, loaded, strict=True)):
        if "error" in found:
            wrong.append(found["error"])
            continue
        for moment in ("now", "end"):
            assert found[moment].keys() == right[moment].keys()
            wrong += [
                f"{rank}/{names}/{moment}" for names in right[moment] if found[moment][names] != right[moment][names]
            ]
    return wrong


# The groups that upstream resumes with other settings than the saved ones.
SECOND_STAGE = ["1/a.weight,a.bias,b.bias/now", "1/a.weight,a.bias,b.bias/end", "1/b.weight/now", "1/b.weight/end"]


def stages(version: str, saved_by: str, loaded_by: str, folder: Path) -> list[str]:
    """The groups of two pipeline stages, in different orders, that do not resume as saved."""
    optimizers = ["distributed"]
    if numbers(version) == (0, 12, 0):
        optimizers.append("float16")
    wrong = []
    for optimizer in optimizers:
        options = ("--stages", "--optimizer", optimizer)
        wrong += resumes(version, saved_by, loaded_by, folder / optimizer, ["plain"], *options)["plain"]
    return wrong


@without_fix(VERSIONS)
def test_upstream_gives_a_group_the_settings_of_another_or_dies(version: str, delivery: str, tmp_path: Path) -> None:
    if numbers(version) < (0, 14):
        assert set(stages(version, delivery, delivery, tmp_path)) == set(SECOND_STAGE)
        return
    found = resumes(version, delivery, delivery, tmp_path, cases(version))
    assert found["plain"] == []
    if numbers(version) < (0, 16):
        assert set(map(tuple, found.values())) == {()}
        assert stages(version, delivery, delivery, tmp_path / "stages") == []
    elif numbers(version) < (0, 19):
        assert found["decoupled"] == ["0/c.weight/now", "0/c.weight/end"]
        assert found.get("mup", ["0/a.weight/now", "0/a.weight/end"]) == ["0/a.weight/now", "0/a.weight/end"]
    else:
        assert found["decoupled"] == found["mup"] == []
        assert found["new_lr"] == ["KeyError: (None, 0.0005, 5e-05, None, None, 1.0, 1.0, False, False)"]


@with_fix(VERSIONS)
def test_every_group_resumes_as_it_was_saved(version: str, delivery: str, tmp_path: Path) -> None:
    found = resumes(version, delivery, delivery, tmp_path, cases(version))
    assert found == {name: [] for name in cases(version)}
    assert stages(version, delivery, delivery, tmp_path) == []
    if (0, 14) <= numbers(version) < (0, 16):
        edits.check_not_needed(tree("megatron-core", version), FIX)


@pytest.mark.parametrize(("version", "name"), [(WITH_COLLISIONS, "decoupled"), (NEWEST, "new_lr")])
def test_without_the_distributed_optimizer(version: str, name: str, tmp_path: Path) -> None:
    options = ("--optimizer", "float16")
    assert resumes(version, "none", "none", tmp_path / "none", [name], *options)[name] != []
    names = cases(version)
    assert resumes(version, "hook", "hook", tmp_path / "hook", names, *options) == {name: [] for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(("version", "bug"), [("0.12.0", "stages"), (WITH_COLLISIONS, "decoupled")])
def test_the_fix_is_in_the_load_alone(version: str, bug: str, tmp_path: Path) -> None:
    """A load with the fix also corrects checkpoints saved without it; saved files stay the same."""

    def wrong(saved_by: str, loaded_by: str) -> list[str]:
        folder = tmp_path / f"{saved_by} {loaded_by}"
        if bug == "stages":
            return stages(version, saved_by, loaded_by, folder)
        return resumes(version, saved_by, loaded_by, folder, [bug])[bug]

    assert wrong("none", "hook") == []
    assert wrong("hook", "none") == wrong("none", "none") != []


@pytest.mark.parametrize("newer", ["0.16.1", NEWEST])
def test_a_checkpoint_of_an_older_release_with_decoupled_rates(newer: str, tmp_path: Path) -> None:
    """Older checkpoints resume: up to 0.15 groups have `is_decoupled_lr`, later ones `default_config`."""
    names = ["decoupled", "new_lr_decoupled"]
    upstreams = resumes("0.15.3", "none", "none", tmp_path / "none", names, loading=newer)
    assert all(wrong != [] for wrong in upstreams.values())
    assert resumes("0.15.3", "none", "hook", tmp_path / "hook", names, loading=newer) == {name: [] for name in names}


def test_a_resume_with_rates_of_a_group_that_has_another_says_so(tmp_path: Path) -> None:
    runs: list[Run] = [
        {"do": "save", "name": "x"},
        *({"do": "load", "name": "x", "lr": lr, "keep": "checkpoint"} for lr in (1e-3, 5e-4)),
    ]
    _, same, new = programs(NEWEST, "hook", tmp_path, runs)
    assert same[0]["warnings"] == []
    assert len(new[0]["warnings"]) == 2
    assert "with wd_mult 1.0, lr_mult 1.0, max_lr 0.0005, min_lr 5e-05, eps" in new[0]["warnings"][0]
    assert "settings saved for wd_mult 1.0, lr_mult 1.0, max_lr 0.001, min_lr 0.0001, eps" in new[0]["warnings"][0]


def test_a_group_without_a_saved_one_is_told_with_the_groups_of_both_sides(tmp_path: Path) -> None:
    """The error for an unpaired group lists the groups of both sides. Upstream continues at the main rate or fails."""
    runs: list[Run] = [{"do": "save", "name": "x"}, {"do": "load", "name": "x", "decoupled_lr": 1e-4}]
    _, ((found,)) = programs(NEWEST, "hook", tmp_path, runs)
    assert found["error"].splitlines()[1:-1] == [
        "  wd_mult 1.0, lr_mult 1.0, max_lr 0.001, min_lr 0.0001, eps 1e-08: 0",
        "  wd_mult 1.0, lr_mult 1.0, is_decoupled_lr True, max_lr 0.0001, min_lr 1e-05, eps 1e-08: ambiguous",
        "  wd_mult 0.0, lr_mult 1.0, max_lr 0.001, min_lr 0.0001, eps 1e-08: 1",
        "and in the checkpoint",
        "  0: wd_mult 1.0, lr_mult 1.0, max_lr 0.001, min_lr 0.0001, eps 1e-08",
        "  1: wd_mult 0.0, lr_mult 1.0, max_lr 0.001, min_lr 0.0001, eps 1e-08",
    ]


def test_what_an_unpatched_resume_has_saved_goes_on_as_it_was_and_is_told(tmp_path: Path) -> None:
    """A checkpoint with all weights at the embedding's rate resumes as saved, with a warning."""
    decoupled = {"decoupled_lr": 1e-4}
    runs: list[Run] = [
        {"do": "save", "name": "x", **decoupled},
        {"do": "load", "name": "x", "resave": "y", **decoupled},
    ]
    _, damaged = programs(WITH_COLLISIONS, "none", tmp_path, runs)
    (loaded,) = programs(WITH_COLLISIONS, "hook", tmp_path, [{"do": "load", "name": "y", **decoupled}])
    assert differences(damaged, loaded) == []
    (warning,) = loaded[0]["warnings"]
    assert "max_lr 0.001" in warning.partition("resumes with")[0]
    assert "max_lr 0.0001" in warning.partition("resumes with")[2]


# As in 0.13.0 to 0.18.2.
KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


def pairs_of(current: list[Run], saved: list[Run], keys: tuple[str, ...] = KEYS) -> dict[int, int]:
    return _pair_param_groups(current, saved, keys)


# The pairing function


def group(kind: tuple[float, float, bool], own_rate: bool, rates: tuple[float, float]) -> dict[str, Any]:
    wd_mult, lr_mult, is_expert_parallel = kind
    return {
        "wd_mult": wd_mult,
        "lr_mult": lr_mult,
        "is_expert_parallel": is_expert_parallel,
        "is_decoupled_lr": False,
        "default_config": not own_rate,
        "max_lr": rates[0],
        "min_lr": rates[1],
        "params": [],
    }


ORDINARY, NO_DECAY = (1.0, 1.0, False), (0.0, 1.0, False)
MAIN, EMBEDDING = group(ORDINARY, False, (1e-3, 1e-4)), group(ORDINARY, True, (1e-4, 1e-5))
BIASES = group(NO_DECAY, False, (1e-3, 1e-4))
EXPERTS = [group((wd_mult, 1.0, True), False, (1e-3, 1e-4)) for wd_mult in (1.0, 0.0)]
SLOW = group((1.0, 0.1, False), False, (1e-4, 1e-5))
SECOND_OF_ITS_KIND = group(ORDINARY, True, (1e-2, 0.0))


@pytest.mark.parametrize("factor", [1.0, 0.3, 0.1, 10.0])
def test_groups_in_any_order_and_at_any_new_rate_find_their_own(factor: float) -> None:
    """At the saved rates all groups are paired; at new rates each group that is the only one of its kind."""
    groups = [MAIN, EMBEDDING, BIASES, *EXPERTS, SLOW]
    groups += [SECOND_OF_ITS_KIND] * (factor == 1.0)
    now = [{**one, "max_lr": factor * one["max_lr"], "min_lr": factor * one["min_lr"]} for one in groups]
    for order in itertools.permutations(range(len(groups))):
        found = pairs_of(now, [groups[index] for index in order])
        assert found == {index: order.index(index) for index in range(len(groups))}


@pytest.mark.parametrize(
    ("current", "saved"),
    [
        ([MAIN, BIASES], [BIASES]),
        ([EMBEDDING, BIASES], [MAIN, BIASES]),  # up to 0.13.1: the first stage has no such group
        ([MAIN, EMBEDDING], [MAIN, BIASES]),
        # two groups with rates of their own, both new: the order does not identify them
        ([group(ORDINARY, True, (n, 1.0)) for n in (2.0, 4.0)], [group(ORDINARY, True, (n, 1.0)) for n in (10.0, 5.0)]),
        # two saved groups for one, with rates that differ from both
        ([group(ORDINARY, True, (2.0, 1.0))], [group(ORDINARY, True, (3.0, 1.0)), group(ORDINARY, True, (4.0, 1.0))]),
        # two groups of this run with one rate, and two in the checkpoint
        ([group(ORDINARY, True, (2.0, 1.0))] * 2, [group(ORDINARY, True, (n, 1.0)) for n in (3.0, 4.0)]),
        ([{**MAIN, "wd_mult": 0.5}], [MAIN]),
        ([MAIN], [group((1.0, 1.0, True), False, (1e-3, 1e-4))]),
    ],
)
def test_what_cannot_be_told_is_no_pair(current: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    assert len(pairs_of(current, saved)) < len(current)


NEMO = [{"pre_wd_mult": one["wd_mult"], "pre_lr_mult": 1.0, "max_lr": one["max_lr"]} for one in (MAIN, BIASES)]
ADAM, MUON = ({**MAIN, "optimizer": name} for name in ("adam", "muon"))  # upstream has the key since 0.19


@pytest.mark.parametrize(
    ("current", "saved", "pairs"),
    [
        ([BIASES, MAIN], NEMO, {0: 1, 1: 0}),
        ([ADAM, MUON], [MUON, ADAM], {0: 1, 1: 0}),
        ([ADAM, BIASES], [MAIN, BIASES], {0: 0, 1: 1}),  # the key counts only if all groups have it
        ([{"lr": 1.0}, {"lr": 2.0}], [{"lr": 1.0}, {"lr": 2.0}], {0: 0, 1: 1}),  # without keys, in order
    ],
)
def test_names_of_nemo_and_groups_of_other_keys(current: list[Run], saved: list[Run], pairs: dict[int, int]) -> None:
    assert pairs_of(current, saved, (*KEYS, "optimizer")) == pairs
