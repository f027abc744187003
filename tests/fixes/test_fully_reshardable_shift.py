"""fully_reshardable_shift: the real megatron-core saves its ranks' state as `fully_reshardable`."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import edits
from ckpt_patches.audit.audit import DAMAGED, WHOLE, audit
from ckpt_patches.cli import main
from ckpt_patches.formats.checkpoint import MASTER
from ckpt_patches.formats.damages import NOTE
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


# Loads of what was saved shifted

IN_NO_FILE = r"expected all of them, found (\d+) elements in no file"
ZEROS = {"CKPT_PATCHES_LOST_STATES": "zeros"}


@pytest.fixture(scope="module")
def shifted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks of the newest release save without the fix."""
    folder = tmp_path_factory.mktemp("shifted")
    run("shifted_saving", folder, tree=tree("megatron-core", NEWEST))
    return folder


def loaded(folder: Path, name: str, *options: str, **more: str) -> dict[str, dict[str, list[int]]]:
    """The elements that differ from the saved run's after a load with the fix, by rank, parameter and state."""
    root = tree("megatron-core", NEWEST)
    found: dict[str, dict[str, list[int]]] = run_json(
        "shifted_saving", folder, *options, "--load", folder / name, tree=root, delivery="hook", env=more
    )
    return found


def test_states_that_are_in_no_file_are_an_error(shifted: Path) -> None:
    with pytest.raises(AssertionError, match=IN_NO_FILE):
        loaded(shifted, "shifted")


def test_all_others_are_restored(shifted: Path) -> None:
    """The lost main parameters are the weights, which differ from them by less than their precision."""
    (wrong,) = loaded(shifted, "shifted", **ZEROS).values()
    before = run_json(
        "shifted_saving", shifted, "--load", shifted / "shifted", tree=tree("megatron-core", NEWEST), delivery="none"
    )
    with pytest.raises(AssertionError) as refused:
        loaded(shifted, "shifted")
    lost = int(re.findall(IN_NO_FILE, str(refused.value))[0])
    assert 0 < sum(map(len, wrong.values())) <= lost
    assert sum(map(len, before["0"].values())) > 5 * lost


@pytest.mark.parametrize("options", [("--ranks", "3"), ("--bucket", "0")], ids=" ".join)
def test_a_run_with_other_buckets_than_the_saving_one_is_warned(shifted: Path, options: tuple[str, ...]) -> None:
    """It cannot put the states back."""
    root = tree("megatron-core", NEWEST)
    load: tuple[str | Path, ...] = (*options, "--load", shifted / "shifted")
    said = run("shifted_saving", shifted, *load, tree=root, delivery="hook", env=ZEROS).stderr
    assert "load it with the data-parallel size" in said


def test_what_was_saved_right_is_loaded_as_it_is(shifted: Path) -> None:
    """A run with many padded buckets loads what one with one bucket has saved, without a warning."""
    assert loaded(shifted, "one_bucket") == {"0": {}}
    load = ("--load", shifted / "one_bucket")
    said = run("shifted_saving", shifted, *load, tree=tree("megatron-core", NEWEST), delivery="hook").stderr
    assert "that round to the weights" not in said


# The tools


def findings(path: Path) -> tuple[str, set[str]]:
    report = audit(path)
    return report.verdict, {finding.kind.name for finding in report.findings if finding.kind.severity != NOTE}


def test_the_audit_names_the_shift(shifted: Path) -> None:
    verdict, found = findings(shifted / "shifted")
    assert verdict == DAMAGED
    assert found >= {"shifted_state"}
    assert found <= {"shifted_state", "lost_master", "lost_weight", "lost_moment"}


@pytest.mark.parametrize("name", ["one_bucket", "even"])
def test_one_bucket_and_buckets_without_padding_are_whole(shifted: Path, name: str) -> None:
    assert findings(shifted / name) == (WHOLE, set())


def test_other_wrong_masters_are_not_called_shifted(shifted: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(shifted / "one_bucket", tmp_path / "copy"))
    shards = audit(path).checkpoint.shards
    (shard,) = [shard for shard in shards if shard.parameter == "module.layers.1.weight" and MASTER in shard.streams]
    (extent,) = shard.streams[MASTER].extents
    with open(extent.path, "r+b") as file:
        file.seek(extent.offset)
        masters = np.frombuffer(file.read(extent.nbytes), np.float32)
        file.seek(extent.offset)
        file.write(np.roll(masters, -40).tobytes())
    verdict, found = findings(path)
    assert verdict == DAMAGED
    assert "unrounded_master" in found
    assert "shifted_state" not in found


@pytest.mark.parametrize(("command", "status"), [("repair", 2), ("migrate", 1)])
def test_the_tools_refuse_a_shifted_checkpoint(
    command: str, status: int, shifted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(shifted / "shifted"), "--output", str(tmp_path / "new")]) == status
    assert "load it with the fix fully_reshardable_shift" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_upstreams_own_repair_is_told_from_other_code(tmp_path: Path) -> None:
    """The repair of its main branch is recognized, and only the load is edited; a mere part of it does not match."""
    repair = (
        "bucket_padding = bucket.grad_data.numel() - bucket.numel_unpadded",
        "adjusted_start = param_world_start - padding_adjustment",
        "adjusted_end = param_world_end - padding_adjustment",
    )
    cut = "state_ten = world_tensors[state_key][param_world_start:param_world_end]"
    for lines, outcome in ((repair, "applies"), (repair[:2], "no match")):
        copy = edits.copy_of(tree(*newest_affected(FIX)), FIX, tmp_path / outcome)
        (path,) = copy.rglob("distrib_optimizer.py")
        text = path.read_text()
        (line,) = [line for line in text.splitlines() if line.strip() == cut]
        indent = line[: -len(cut)]
        added = "\n".join(indent + part for part in (*lines, cut.replace("param_world", "adjusted")))
        path.write_text(text.replace(line, added))
        result, made = edits.plan(copy, FIX)
        assert result.outcome.value == outcome
        for file in made.files.values():
            assert b"_without_shift(self.buffers" in file.patched
            assert b"param_world_start -= end_padding" not in file.patched
            assert file.patched.count(b"def _end_padding_before_buckets") == 1
