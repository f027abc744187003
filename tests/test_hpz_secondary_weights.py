"""hpz_secondary_weights: the next loss after every way to load a checkpoint, with hpZ."""

from pathlib import Path

import pytest

from upstream import newest_affected, run_json, tree

FIX = "hpz_secondary_weights"
NEWEST = newest_affected(FIX)[1]
# The last release that drops no secondary partition after a load, and the first that drops trained parameters'.
NONE, TRAINED = "0.18.2", "0.18.3"
LOADS = ("all", "module", "weights", "universal")


def right(version: str, fixed: bool, folder: Path, *arguments: str) -> list[str]:
    """The loads after which the loss equals the saved run's, with all other fixes on."""
    root, env = tree("deepspeed", version), {} if fixed else {"CKPT_PATCHES_SKIP": FIX}
    found = run_json("hpz_loads", folder, *arguments, tree=root, delivery="hook", env=env)
    expected = found.pop("expected")
    assert list(found) == [argument for argument in arguments if argument in LOADS]
    return [name for name, loss in found.items() if loss == expected]


@pytest.mark.parametrize("fixed", [False, True])
def test_every_load(fixed: bool, tmp_path: Path) -> None:
    """Every load is right with the fix; without it, since 0.18.3, only loads into gathered parameters are."""
    assert right(NEWEST, fixed, tmp_path, *LOADS) == (list(LOADS) if fixed else ["module", "weights"])


def test_persistent_parameters_are_gathered_from_what_was_loaded(tmp_path: Path) -> None:
    """Every load is right: their secondary partitions are not read, so dropping them has no effect."""
    assert right(NEWEST, True, tmp_path, *LOADS, "--persistent") == list(LOADS)


@pytest.mark.parametrize("fixed", [False, True])
def test_every_load_where_no_load_renews_them(fixed: bool, tmp_path: Path) -> None:
    assert right(NONE, fixed, tmp_path, *LOADS) == (list(LOADS) if fixed else [])


@pytest.mark.parametrize(
    ("version", "fixed", "expected"), [(NONE, False, []), (NONE, True, ["all"]), (TRAINED, False, ["all"])]
)
def test_trained_parameters(version: str, fixed: bool, expected: list[str], tmp_path: Path) -> None:
    assert right(version, fixed, tmp_path, "all", "--trained") == expected
