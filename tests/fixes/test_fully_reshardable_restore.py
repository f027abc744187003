"""fully_reshardable_restore: the real megatron-core loads what it saved as `fully_reshardable` with shifted states."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_patches.audit.audit import DAMAGED, WHOLE, audit
from ckpt_patches.audit.judging.record_checksums import update_checksum
from ckpt_patches.cli import main
from ckpt_patches.engine.installed import STATE_FOLDER
from ckpt_patches.formats.checkpoint import MASTER, WEIGHT
from ckpt_patches.formats.damages import NOTE
from upstream import affected, newest_affected, once, run, run_json, tree, with_fix, without_fix

FIX = "fully_reshardable_restore"
AFFECTED = affected(FIX)
NEWEST = newest_affected(FIX)[1]
IN_NO_FILE = r"expected all of them, found (\d+) elements in no file"
ZEROS = {"CKPT_PATCHES_LOST_STATES": "zeros"}


def without_fixes(root: Path) -> Path:
    """A tree as upstream made it: an environment may have fixes in its files."""
    return (
        once(f"without fixes of {root.name}", lambda own: revert_copy(root, own))
        if (root / STATE_FOLDER).is_dir()
        else root
    )


def revert_copy(root: Path, own: Path) -> None:
    for folder in ("megatron", STATE_FOLDER):
        shutil.copytree(root / folder, own / folder)
    assert main(["revert", "--tree", str(own)]) == 0


def saved_shifted(version: str, folder: Path) -> Path:
    """What two ranks of a release save without the fixes."""
    root = tree("megatron-core", version)
    run("shifted_saving", folder, tree=without_fixes(root), path=[root])
    return folder


def other_elements(version: str, delivery: str, folder: Path, name: str, **env: str) -> dict[str, list[int]]:
    """The elements that differ from the saved run's after a load, by parameter and state."""
    root = tree("megatron-core", version)
    own = without_fixes(root) if delivery == "none" else root
    load = ("--load", folder / name)
    keywords: dict[str, Any] = {"tree": own, "path": [root], "delivery": delivery, "env": env}
    found: dict[str, list[int]] = run_json("shifted_saving", folder, *load, **keywords)["0"]
    return found


def number(elements: dict[str, list[int]]) -> int:
    return sum(map(len, elements.values()))


@without_fix(AFFECTED)
def test_upstream_loads_shifted_states_without_an_error(version: str, delivery: str, tmp_path: Path) -> None:
    assert number(other_elements(version, delivery, saved_shifted(version, tmp_path), "shifted")) > 1000


@with_fix(AFFECTED)
def test_they_are_put_back_and_those_in_no_file_are_an_error(version: str, delivery: str, tmp_path: Path) -> None:
    """The lost main parameters are the weights, which differ from them by less than their precision."""
    folder = saved_shifted(version, tmp_path)
    with pytest.raises(AssertionError, match=IN_NO_FILE) as refused:
        other_elements(version, delivery, folder, "shifted")
    lost = int(re.findall(IN_NO_FILE, str(refused.value))[0])
    wrong = number(other_elements(version, delivery, folder, "shifted", **ZEROS))
    assert 0 < wrong <= lost
    assert number(other_elements(version, "none", folder, "shifted")) > 5 * lost


# Further cases


@pytest.fixture(scope="module")
def shifted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_shifted(NEWEST, tmp_path_factory.mktemp("shifted"))


@pytest.mark.parametrize("options", [("--ranks", "3"), ("--bucket", "0")], ids=" ".join)
def test_a_run_with_other_buckets_than_the_saving_one_is_refused(shifted: Path, options: tuple[str, ...]) -> None:
    """It cannot put the states back."""
    load: tuple[str | Path, ...] = (*options, "--load", shifted / "shifted")
    with pytest.raises(AssertionError, match="load it with the data-parallel size"):
        run("shifted_saving", shifted, *load, tree=tree("megatron-core", NEWEST), delivery="hook", env=ZEROS)


def test_what_was_saved_right_is_loaded_as_it_is(shifted: Path) -> None:
    """A run with many padded buckets loads what one with one bucket has saved, without a warning."""
    assert other_elements(NEWEST, "hook", shifted, "one_bucket") == {}
    load = ("--load", shifted / "one_bucket")
    said = run("shifted_saving", shifted, *load, tree=tree("megatron-core", NEWEST), delivery="hook").stderr
    assert "that round to the weights" not in said


def test_weights_that_fp8_has_rounded_are_no_shift(shifted: Path, tmp_path: Path) -> None:
    """The states are loaded as they are, with a warning."""
    path = Path(shutil.copytree(shifted, tmp_path / "run"))
    found = audit(path / "one_bucket").checkpoint
    (shard,) = [own for own in found.shards if own.parameter == "module.layers.1.weight" and MASTER in own.streams]
    (extent,) = shard.streams[WEIGHT].extents
    weights = torch.from_file(extent.path, shared=True, size=extent.offset + extent.nbytes, dtype=torch.uint8)
    own = weights[extent.offset :].view(torch.bfloat16)
    own.copy_(own.to(torch.float8_e4m3fn).to(torch.bfloat16))
    for record in found.records:
        update_checksum(record)
    load = ("--load", path / "one_bucket")
    done = run("shifted_saving", path, *load, tree=tree("megatron-core", NEWEST), delivery="hook")
    assert "not checked for a shift" in " ".join(done.stderr.split())
    assert json.loads(done.stdout.splitlines()[-1])["0"] == {}


# The tools


def findings(path: Path) -> tuple[str, set[str]]:
    report = audit(path)
    return report.verdict, {finding.kind.name for finding in report.findings if finding.kind.severity != NOTE}


def test_the_audit_names_the_shift(shifted: Path) -> None:
    verdict, found = findings(shifted / "shifted")
    assert verdict == DAMAGED
    assert found >= {"shifted_state"}
    assert found <= {"shifted_state", "lost_master", "lost_weight", "lost_moment"}


def test_one_bucket_is_whole(shifted: Path) -> None:
    assert findings(shifted / "one_bucket") == (WHOLE, set())


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
    assert "load it with fully_reshardable_restore" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
