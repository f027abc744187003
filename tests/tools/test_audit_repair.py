"""Repair: the copy audits as REPAIRED and has the planned values, and the original is unchanged."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckpt_patches.audit.audit import REPAIRED, WHOLE, audit
from ckpt_patches.audit.repair.plan import FROM_OLDER, FROM_WEIGHT, RESET
from ckpt_patches.audit.repair_list import NAME
from ckpt_patches.cli import main
from ckpt_patches.runtime.units import in_bytes
from every_checkpoint import EVERY, in_torch_file, put
from megatron_checkpoints import ZARR, ZARR_TP, Configuration, written
from test_audit import (
    Change,
    chunk,
    copied,
    lengthen_chunk,
    lose_first_moment,
    lose_square,
    put_nan,
    remove_array,
    remove_chunk,
    remove_weights,
    shorten_chunk,
    state,
)
from test_audit_many import Arrays, arrays
from test_audit_many import written as written_by_hand

pytestmark = pytest.mark.slow

HYBRID = Configuration(ranks=2, backend="torch_dist", iterations="0,1", reload="hybrid")


def contents(folder: Path) -> dict[str, str]:
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def listed(output: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((output / NAME).read_text())["repaired"]
    return found


@pytest.mark.parametrize("run", [ZARR, ZARR_TP], ids=str)
@pytest.mark.parametrize("older", [False, True])
def test_what_races_lost(run: Configuration, older: bool, tmp_path: Path) -> None:
    options = ["--from", str(written(run).whole[-1])] if older else ["--reset-moments"]
    for path in written(run).raced:
        if audit(path).verdict == WHOLE:
            continue
        before = contents(path)
        output = tmp_path / path.name
        status = main(["repair", str(path), "--output", str(output), *options])
        assert contents(path) == before
        assert status == 0 or (status == 2 and not older)  # both moments are lost in a place: nothing to reset there
        if status == 0:
            assert audit(output).verdict == REPAIRED
            check_values(path, output, written(run).whole[-1], older)


def check_values(path: Path, output: Path, whole: Path, older: bool) -> None:
    """Check that main parameters equal the weights, moments the older checkpoint's or 0, and the rest is unchanged."""
    ranges = listed(output)
    source = f"{FROM_OLDER}: {whole}, step 3" if older else RESET
    assert {str(entry["source"]) for entry in ranges} <= {FROM_WEIGHT, source}
    for file in (f for f in whole.glob("optimizer.state.*/[0-9]*") if f.parent.suffix != ".sync"):
        name = file.relative_to(whole)
        damaged, mended, truth = (np.fromfile(folder / name, np.float32) for folder in (path, output, whole))
        expected = damaged.copy()
        for entry in ranges:
            if entry["array"] == name.parts[0] and entry["shard"] == name.parts[1]:
                here = np.concatenate([np.arange(*found) for found in entry["ranges"]])
                expected[here] = (
                    weights(path, name)[here] if "fp32_param" in name.parts[0] else truth[here] if older else 0
                )
        np.testing.assert_array_equal(mended, expected)


def weights(path: Path, name: Path) -> Any:
    array = name.parts[0].removeprefix("optimizer.state.fp32_param.")
    bits = np.fromfile(path / array / name.parts[1], np.uint16)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


@pytest.fixture
def zarr(tmp_path: Path) -> Path:
    return copied(written(ZARR).whole[-1], tmp_path)


@pytest.mark.parametrize(
    "change",
    [lose_first_moment, lose_square, put_nan, remove_chunk, shorten_chunk],
)
def test_crafted_damage(zarr: Path, tmp_path: Path, change: Change) -> None:
    change(zarr)
    for number, options in enumerate((["--reset-moments"], ["--from", str(written(ZARR).whole[-1])])):
        output = tmp_path / f"new{number}"
        assert main(["repair", str(zarr), "--output", str(output), *options]) == 0
        assert audit(output).verdict == REPAIRED


@pytest.mark.parametrize("change", [remove_array, remove_weights, lengthen_chunk])
def test_what_cannot_be_repaired_is_said_before_anything_is_written(
    zarr: Path, tmp_path: Path, change: Change, capsys: pytest.CaptureFixture[str]
) -> None:
    change(zarr)
    assert main(["repair", str(zarr), "--output", str(tmp_path / "new")]) == 2
    first, *damages = capsys.readouterr().err.splitlines()
    assert first == f"ckpt-patches: {zarr} cannot be repaired, and nothing was written:"
    assert damages
    assert all(re.match(r"  \w+ \S", line) for line in damages)  # as in docs/reference/commands.md on `repair`
    assert all("the checkpoint has nothing to take it from" in line for line in damages)
    assert not any("repair as" in line or "take another" in line for line in damages)
    assert [path.name for path in tmp_path.iterdir()] == [zarr.name]


def test_all_damage_is_repaired_or_none(zarr: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(zarr / "optimizer.state.exp_avg_sq.module.down.weight")
    left = findings(zarr)
    lose_first_moment(zarr)
    assert main(["repair", str(zarr), "--output", str(tmp_path / "new"), "--from", str(written(ZARR).whole[-1])]) == 2
    err = capsys.readouterr().err
    assert all(f"  {name} {array} " in err for name, array in left)
    assert "lost_moment" not in err
    assert [path.name for path in tmp_path.iterdir()] == [zarr.name]


def findings(path: Path) -> set[tuple[str, str]]:
    return {(f.kind.name, f.array) for f in audit(path).findings if f.kind.severity != "note"}


def test_a_wrong_checksum_is_not_made_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bit flip that only the checksum shows is not hidden by the repair of another element of the file."""
    source = EVERY["universal of stage 2"].path
    damaged = copied(source, tmp_path)
    (place,) = in_torch_file(damaged / "zero/w1.weight/exp_avg.pt")
    put(place, np.float32(np.nan).tobytes(), first=1)
    with open(place.path, "r+b") as file:
        file.seek(place.offset + 8)
        file.write(bytes([place.data()[8] ^ 1]))
    assert {name for name, _ in findings(damaged)} == {"bad_file", "not_finite"}
    assert main(["repair", str(damaged), "--output", str(tmp_path / "new"), "--reset-moments"]) == 2
    assert "  bad_file " in capsys.readouterr().err


def test_an_older_one_with_the_same_damage_is_refused(
    zarr: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lose_square(zarr)
    older = copied(zarr, tmp_path / "older")
    assert main(["repair", str(zarr), "--output", str(tmp_path / "new"), "--from", str(older)]) == 2
    assert f"--from {older}: expected a checkpoint that is WHOLE, found it DAMAGED" in capsys.readouterr().err


def test_a_whole_one_needs_nothing_and_an_output_that_exists_is_refused(zarr: Path, tmp_path: Path) -> None:
    assert main(["repair", str(zarr), "--output", str(tmp_path / "new")]) == 0
    assert not (tmp_path / "new").exists()
    lose_square(zarr)
    assert main(["repair", str(zarr), "--output", str(zarr)]) == 2


def test_masters_that_no_reload_reached_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the real hybrid optimizer's main parameters no one rounds to its weight, and nothing tells which are right."""
    damaged, stepped = written(HYBRID).whole
    assert {finding.kind.name for finding in audit(damaged).findings if finding.kind.severity == "damage"} == {
        "unrounded_master"
    }
    assert audit(stepped).verdict == WHOLE  # the step set the weights from the main parameters
    assert main(["repair", str(damaged), "--output", str(tmp_path / "new")]) == 2
    assert "contradict each other, and nothing tells which of them are right" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_repaired_range_is_no_damage_only_with_its_list(zarr: Path, tmp_path: Path) -> None:
    lose_first_moment(zarr)
    output = tmp_path / "new"
    assert main(["repair", str(zarr), "--output", str(output), "--reset-moments"]) == 0
    assert {finding.kind.name for finding in audit(output).findings} >= {"repaired"}
    shutil.move(output / NAME, tmp_path / "elsewhere")
    assert audit(output).verdict != WHOLE
    assert np.all(chunk(output, state("exp_avg"))[:100] == 0)


# No other changes


def many_damaged(tmp_path: Path) -> tuple[Path, Arrays]:
    """A checkpoint with thousands of separate damaged elements, and its states."""
    states = arrays(20_000, 64)
    states["fp32_param"].reshape(-1)[5::700] = np.nan
    states["exp_avg"].reshape(-1)[77::600] = np.inf
    states["exp_avg_sq"].reshape(-1)[333::900] = -1
    return written_by_hand(tmp_path / "damaged", states, arrays(20_000, 64)["fp32_param"]), states


def test_no_other_element_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, states = many_damaged(tmp_path)
    assert main(["repair", str(path), "--output", str(tmp_path / "new"), "--reset-moments"]) == 0
    original = arrays(20_000, 64)
    weight = original["fp32_param"].astype(ml_dtypes.bfloat16).astype(np.float32).reshape(-1)
    expected = {name: states[name].copy().reshape(-1) for name in states}
    expected["fp32_param"][5::700] = weight[5::700]
    for moment in ("exp_avg", "exp_avg_sq"):  # both are reset where one is damaged
        expected[moment][77::600] = expected[moment][333::900] = 0
    for name, values in expected.items():
        found = np.fromfile(tmp_path / "new" / f"optimizer.state.{name}.layer.weight" / "0.0", np.float32)
        np.testing.assert_array_equal(found, values)
    reset = {*range(77, 1_280_000, 600), *range(333, 1_280_000, 900)}
    assert (
        f" {len(range(5, 1_280_000, 700)) + 2 * len(reset)} elements repaired, no other changed"
        in capsys.readouterr().out
    )


def test_a_repaired_one_can_be_repaired_again(zarr: Path, tmp_path: Path) -> None:
    lose_first_moment(zarr)
    assert main(["repair", str(zarr), "--output", str(tmp_path / "once"), "--reset-moments"]) == 0
    chunk(tmp_path / "once", state("exp_avg"))[500] = np.nan
    assert main(["repair", str(tmp_path / "once"), "--output", str(tmp_path / "twice"), "--reset-moments"]) == 0
    assert audit(tmp_path / "twice").verdict == REPAIRED
    assert len(listed(tmp_path / "twice")) > len(listed(tmp_path / "once"))


def test_the_list_says_nothing_of_another_checkpoint(zarr: Path, tmp_path: Path) -> None:
    """A repair list copied to another checkpoint is stale, and does not hide damage there."""
    other = copied(zarr, tmp_path / "other")
    lose_first_moment(zarr)
    assert main(["repair", str(zarr), "--output", str(tmp_path / "new"), "--reset-moments"]) == 0
    shutil.copy(tmp_path / "new" / NAME, other / NAME)
    assert {finding.kind.name for finding in audit(other).findings} >= {"stale_list"}
    assert audit(other).verdict == WHOLE
    chunk(other, state("exp_avg"))[:90] = 0
    assert audit(other).verdict != WHOLE


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"repaired": [], "files": {"../x": [1, 2]}}', b'{"repaired": 3}'])
def test_a_list_of_another_making_is_none(zarr: Path, content: bytes) -> None:
    (zarr / NAME).write_bytes(content)
    assert audit(zarr).verdict == WHOLE
    assert "stale_list" in {finding.kind.name for finding in audit(zarr).findings}


def test_a_later_step_is_no_older_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, last = written(ZARR).whole[-2:]
    damaged = copied(before, tmp_path / "damaged")
    lose_first_moment(damaged)
    assert main(["repair", str(damaged), "--output", str(tmp_path / "new"), "--from", str(last)]) == 2
    step = audit(before).checkpoint.step
    assert f"--from {last}: expected step {step} at the latest" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_the_older_one_is_named_in_the_output_and_in_the_list(
    zarr: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older = written(ZARR).whole[-2]
    lose_first_moment(zarr)
    assert main(["repair", str(zarr), "--output", str(tmp_path / "new"), "--from", str(older)]) == 0
    source = f"{FROM_OLDER}: {older}, step {audit(older).checkpoint.step}"
    assert source in capsys.readouterr().out
    assert {entry["source"] for entry in listed(tmp_path / "new")} == {source}


def test_the_size_of_the_copy_is_printed_before(zarr: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lose_first_moment(zarr)
    assert main(["repair", str(zarr), "--output", str(tmp_path / "new"), "--reset-moments"]) == 0
    size = in_bytes(sum(file.stat().st_size for file in zarr.rglob("*") if file.is_file()))
    assert f"{tmp_path / 'new'}: copying {size}, and " in capsys.readouterr().err


def test_an_output_in_the_source_is_refused(zarr: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lose_first_moment(zarr)
    assert main(["repair", str(zarr), "--output", str(zarr / "new")]) == 2
    assert "expected an output folder outside of" in capsys.readouterr().err


def test_the_room_for_the_copy_is_checked_before_it_is_made(
    zarr: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lose_first_moment(zarr)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 1 << 40, 1000))
    assert main(["repair", str(zarr), "--output", str(tmp_path / "new")]) == 2
    assert re.search(r"needs \d.*, and .* has 1000 B free", capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == [zarr.name]
