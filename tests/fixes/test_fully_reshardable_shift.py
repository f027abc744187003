"""fully_reshardable_shift: the real megatron-core saves its ranks' state as `fully_reshardable`."""

from pathlib import Path

import pytest

import edits
from upstream import affected, newest_affected, run, run_json, tree, with_fix, without_fix

FIX = "fully_reshardable_shift"
AFFECTED = affected(FIX)
NEWEST = newest_affected(FIX)[1]


def wrong_elements(version: str, saved_by: str, loaded_by: str, folder: Path, *options: str) -> dict[str, int]:
    """The number of elements that differ from the saved run after a load, by rank, parameter and state.

    The saving run writes its ranks' main parameters and moments beside the checkpoint.
    """
    root = tree("megatron-core", version)
    run("shifted_saving", folder, *options, tree=root, delivery=saved_by)
    found = run_json("shifted_saving", folder, *options, "--load", folder / "shifted", tree=root, delivery=loaded_by)
    return {f"{rank}/{key}": len(numbers) for rank, own in found.items() for key, numbers in own.items()}


def fixed_upstream(version: str) -> bool:
    """Whether Megatron-LM#5077, which is in no release, fixed it."""
    return version == "main"


@without_fix(AFFECTED)
def test_upstream_saves_what_lies_behind_a_padded_bucket_elsewhere(version: str, delivery: str, tmp_path: Path) -> None:
    wrong = wrong_elements(version, delivery, delivery, tmp_path)
    if fixed_upstream(version):
        assert wrong == {}
        return
    states = {key.rpartition("/")[2] for key in wrong}
    assert states == {"param", "exp_avg", "exp_avg_sq"}
    assert sum(wrong.values()) > 1000


@with_fix(AFFECTED)
def test_a_load_brings_back_every_element(version: str, delivery: str, tmp_path: Path) -> None:
    """An unpatched run loads every element right from the fixed file."""
    assert wrong_elements(version, delivery, "none", tmp_path) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [("--ranks", "3"), ("--ranks", "3", "--gloo"), ("--ranks", "4", "--tp", "2")],
    ids=" ".join,
)
def test_on_more_ranks_gathered_in_both_ways(options: tuple[str, ...], tmp_path: Path) -> None:
    assert wrong_elements(NEWEST, "hook", "hook", tmp_path, *options) == {}


def test_upstreams_own_repair_is_told_from_other_code(tmp_path: Path) -> None:
    """The repair of its main branch is recognized; a mere part of it does not match."""
    repair = (
        "bucket_padding = bucket.grad_data.numel() - bucket.numel_unpadded",
        "adjusted_start = param_world_start - padding_adjustment",
        "adjusted_end = param_world_end - padding_adjustment",
    )
    cut = "state_ten = world_tensors[state_key][param_world_start:param_world_end]"
    for lines, outcome in ((repair, "not needed"), (repair[:2], "no match")):
        copy = edits.copy_of(tree(*newest_affected(FIX)), FIX, tmp_path / outcome)
        (path,) = copy.rglob("distrib_optimizer.py")
        text = path.read_text()
        (line,) = [line for line in text.splitlines() if line.strip() == cut]
        indent = line[: -len(cut)]
        added = "\n".join(indent + part for part in (*lines, cut.replace("param_world", "adjusted")))
        path.write_text(text.replace(line, added))
        result, made = edits.plan(copy, FIX)
        assert result.outcome.value == outcome
        assert made.files == {}
