"""What a repair refuses because it would be a guess, and what a killed one leaves; compared with the truth."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckpt_patches.audit.audit import DAMAGED, REPAIRED, WHOLE, audit
from ckpt_patches.audit.judging import record_checksums
from ckpt_patches.audit.repair import plan, same_run
from ckpt_patches.audit.repair.same_run import tensors
from ckpt_patches.cli import main
from ckpt_patches.formats.checkpoint import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    MOMENTS,
    WEIGHT,
    Checkpoint,
    Extent,
    Shard,
    Stream,
)
from ckpt_patches.formats.elements import read_elements
from dcp_checkpoints import saved
from megatron_checkpoints import ZARR, written
from test_audit import copied, lose_first_moment, lose_master, lose_square, state
from test_audit_repair import contents, listed
from test_same_run import of_seed

pytestmark = pytest.mark.slow


def change(folder: Path, role: str, begin: int, end: int, value: float, files: str = "") -> None:
    """Set elements of the largest parameter, or of all parameters in these files, and update the checksums."""
    found = audit(folder, 1).checkpoint
    shards = [shard for shard in found.shards if role in shard.streams]
    for shard in shards if files else [max(shards, key=lambda shard: shard.numel)]:
        at = 0
        for extent in shard.streams[role].extents:
            values = np.memmap(extent.path, np.float32, "r+", extent.offset, (extent.nbytes // 4,))
            if files in extent.path:
                values[max(begin - at, 0) : max(end - at, 0)] = value
            at += len(values)
    for record in found.records:
        record_checksums.update_checksum(record)


def values(folder: Path) -> dict[tuple[str, str], Any]:
    """All elements of the arrays with states of optimizers, by array and shard."""
    shards = [shard for shard in audit(folder, 1).checkpoint.shards if {*MOMENTS} & shard.streams.keys()]
    return {
        (stream.array, shard.label): read_elements(stream, 0, shard.numel)
        .view(np.uint8)
        .copy()
        .reshape(shard.numel, -1)
        for shard in shards
        for stream in shard.streams.values()
    }


def check_truth(output: Path, truth: Path, older: Path | None) -> None:
    """Check that all elements are the truth's but the listed ones, which are the older's; or both moments are zero."""
    expected = values(truth)
    for entry in listed(output):
        prefix = entry["array"].rpartition("exp_avg")[0]
        keys = [k for k in expected if k[1] == entry["shard"] and k[0].startswith(f"{prefix}exp_avg") and not older]
        for begin, end in entry["ranges"]:
            for key in keys or [(entry["array"], entry["shard"])]:
                expected[key][begin:end] = values(older)[key][begin:end] if older else 0
    for key, found in values(output).items():
        np.testing.assert_array_equal(found, expected[key], str(key))


def refused(capsys: pytest.CaptureFixture[str], path: Path, output: Path, *options: str) -> str:
    """The error of a repair, which leaves nothing and changes nothing."""
    before, beside = contents(path), sorted(output.parent.iterdir())
    capsys.readouterr()
    assert main(["repair", str(path), "--output", str(output), *options]) == 2
    assert (contents(path), sorted(output.parent.iterdir())) == (before, beside)
    return capsys.readouterr().err


# Files of which one is another's


@pytest.fixture
def zero(tmp_path: Path) -> Path:
    return Path(shutil.copytree(of_seed(0, 2) / "global_step10", tmp_path / "run" / "global_step10"))


@pytest.mark.parametrize("source", [of_seed, lambda *_: of_seed(0, 2)], ids=["another run", "an earlier step"])
def test_weights_that_are_others_do_not_replace_main_parameters(
    source: Any, zero: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, step = "mp_rank_00_model_states.pt", "global_step2"
    shutil.copy(source(1, 2) / step / name, zero / name)
    said = refused(capsys, zero, tmp_path / "new")
    assert name in said
    assert "nothing tells which of them are right" in said
    assert "nothing was written" in said


def test_a_ranks_file_of_another_run_is_not_made_to_fit(
    zero: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(of_seed(1, 2) / "global_step10" / name, zero / name)
    assert audit(zero).verdict == DAMAGED
    for options in ([], ["--from", str(of_seed(0, 2) / "global_step2")]):
        said = refused(capsys, zero, tmp_path / "new", *options)
        assert name in said
        assert "nothing tells which of them are right" in said


@pytest.mark.parametrize("elements", [1, 1 << 40], ids=["one element", "all elements"])
@pytest.mark.parametrize("role", [MASTER, WEIGHT])
def test_main_parameters_that_contradict_their_weights_are_refused(
    role: str, elements: int, zero: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Either of the two can be another run's or step's, however few elements show it."""
    found = audit(zero, 1).checkpoint
    shards = [own for own in found.shards if {MASTER, WEIGHT} <= own.streams.keys() and own.numel >= 8]
    shard = min(shards, key=lambda own: own.numel)
    for extent in shard.streams[role].extents:
        with open(extent.path, "r+b") as file:
            file.seek(extent.offset)
            file.write(b"\x40\x40" * (min(extent.nbytes, 4 * elements) // 2))  # about 3, in float32 and bfloat16
    for record in found.records:
        record_checksums.update_checksum(record)
    assert {f.kind.name for f in audit(zero).findings if f.kind.severity == "damage"} == {"unrounded_master"}
    for options in ([], ["--from", str(of_seed(0, 2) / "global_step2")]):
        said = refused(capsys, zero, tmp_path / "new", *options)
        assert "contradict each other, and nothing tells which of them are right" in said
        assert all(Path(own.extents[0].path).name in said for own in (shard.streams[MASTER], shard.streams[WEIGHT]))


def test_all_that_a_rank_holds_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FSDP2: a rank's weights and moments are zeros. Zeros over zeros repair nothing, and older ones are a guess."""
    path = copied(saved() / "fsdp", tmp_path)
    for role in (MASTER, *MOMENTS):
        change(path, role, 0, 1 << 40, 0.0, files="__1_0.distcp")
    assert audit(path).verdict == DAMAGED
    for options in (["--reset-moments"], ["--from", str(saved() / "fsdp")]):
        assert "expected damage in a small part" in refused(capsys, path, tmp_path / "new", *options)


@pytest.mark.parametrize(
    ("begin", "at_a_time"),
    [(0, plan.AT_A_TIME), (0, 7), (3, plan.AT_A_TIME)],
    ids=["a row", "read in parts", "a part of it"],
)
def test_rows_that_the_file_of_another_run_can_have_are_not_filled(
    begin: int,
    at_a_time: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """HSDP: the moments of a parameter are in two ranks' files, of which one may be another run's or another step's.

    A token that this run has seen and that one has not is whole rows in one moment alone: all that shows the file.
    """
    monkeypatch.setattr(plan, "AT_A_TIME", at_a_time)
    truth, path = saved() / "hsdp", copied(saved() / "hsdp", tmp_path)
    found = audit(path, 1).checkpoint
    shards = [shard for shard in found.shards if {*MOMENTS} <= shard.streams.keys() and len(shard.shape) > 1]
    files = [{extent.path for role in MOMENTS for extent in shard.streams[role].extents} for shard in shards]
    shard, two = next((shard, own) for shard, own in zip(shards, files, strict=True) if len(own) == 2)
    (extent,) = shard.streams[EXP_AVG_SQ].extents
    values = np.memmap(extent.path, np.float32, "r+", extent.offset, (shard.numel,))
    values[2 * shard.row + begin : 3 * shard.row] = 0.0
    values.flush()
    for record in found.records:
        record_checksums.update_checksum(record)
    assert audit(path).verdict == DAMAGED
    if begin:
        assert main(["repair", str(path), "--output", str(tmp_path / "new"), "--reset-moments"]) == 0
        check_truth(tmp_path / "new", truth, None)
    for options in () if begin else ([], ["--reset-moments"], ["--from", str(truth)]):
        said = refused(capsys, path, tmp_path / "new", *options)
        assert " and ".join(sorted(Path(name).name for name in two)) in said
        assert "can be of two runs or steps, of which one had no gradient in these rows" in said


def test_zeros_over_zeros_repair_nothing(zero: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for role in MOMENTS:
        change(zero, role, 5, 35, 0.0)
    assert "zeros over zeros repair nothing" in refused(capsys, zero, tmp_path / "new", "--reset-moments")
    change(zero, EXP_AVG, 50, 60, np.nan)
    for options in ([], ["--reset-moments"]):
        said = refused(capsys, zero, tmp_path / "new", *options)
        assert "zeros over zeros repair nothing" in said
        assert "repeat with --from OLDER" in said


# Moments


def test_a_reset_is_refused_and_names_the_neighbor_that_has_the_moments(
    zero: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = Path(shutil.copytree(zero, tmp_path / "truth"))
    change(zero, EXP_AVG_SQ, 5, 35, 0.0)
    assert "--from OLDER" in refused(capsys, zero, tmp_path / "new")  # there is no other one
    for step in (2, 50):
        shutil.copytree(of_seed(0, 2) / f"global_step{step}", zero.parent / f"global_step{step}")
    shutil.copytree(of_seed(1, 2) / "global_step10", zero.parent / "of_another_run")
    older = zero.parent / "global_step2"
    assert f"repeat with --from {older}, " in refused(capsys, zero, tmp_path / "new")
    assert main(["repair", str(zero), "--output", str(tmp_path / "new"), "--from", str(older)]) == 0
    assert audit(tmp_path / "new").verdict == REPAIRED
    check_truth(tmp_path / "new", truth, older)
    assert main(["repair", str(zero), "--output", str(tmp_path / "reset"), "--reset-moments"]) == 0
    check_truth(tmp_path / "reset", truth, None)
    change(older, EXP_AVG, 0, 1, np.nan)
    assert "--from OLDER" in refused(capsys, zero, tmp_path / "other")


def test_an_older_save_of_another_number_of_ranks(tmp_path: Path) -> None:
    """torch.distributed.checkpoint: the tensors of the older one are not cut, those of the damaged one are."""
    older, truth, path = saved() / "fsdp", saved() / "step-9", copied(saved() / "step-9", tmp_path)
    dcp_to_torch_save(older, tmp_path / "all.pt")
    joined = tmp_path / "joined"
    dcp.save(torch.load(tmp_path / "all.pt", weights_only=False), checkpoint_id=joined, no_dist=True)
    assert len(list(older.glob("*.distcp"))) > len(list(joined.glob("*.distcp")))
    change(path, EXP_AVG, 30, 90, 0.0)
    assert audit(path).verdict == DAMAGED
    for number, source in enumerate((older, joined)):
        assert main(["repair", str(path), "--output", str(tmp_path / f"{number}"), "--from", str(source)]) == 0
        check_truth(tmp_path / f"{number}", truth, older)


@hypothesis.given(st.data())
def test_elements_are_found_however_a_tensor_is_cut(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

    def cut(folder: Path) -> Checkpoint:
        edges = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
        found = Checkpoint(folder, "")
        for number, index in enumerate(np.ndindex(*(len(own) - 1 for own in edges))):
            box = [(own[at], own[at + 1]) for own, at in zip(edges, index, strict=True)]
            part = np.ascontiguousarray(array[tuple(slice(*ends) for ends in box)])
            (folder / str(number)).write_bytes(part.tobytes())
            stream = Stream("a", "float32", (Extent(str(folder / str(number)), 0, part.nbytes),))
            begin = tuple(first for first, _ in box)
            found.shards.append(Shard("p", str(number), part.shape, {EXP_AVG: stream}, begin=begin))
        return found

    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        source = tensors(cut(Path(one)))
        for shard in cut(Path(other)).shards:
            begin = data.draw(st.integers(0, shard.numel - 1))
            stream = shard.streams[EXP_AVG]
            found = same_run.read(source, shard, stream, begin, shard.numel)
            assert found is not None
            np.testing.assert_array_equal(found, read_elements(stream, begin, shard.numel).view(np.uint8))
        source["a", ""].pop()
        parts = [same_run.read(source, s, s.streams[EXP_AVG], 0, s.numel) for s in cut(Path(other)).shards]
        assert any(part is None for part in parts)


@pytest.mark.parametrize("what", ["an array", "a chunk"])
def test_one_of_two_moments_is_absent(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copied(written(ZARR).whole[-1], tmp_path)
    if what == "an array":
        shutil.rmtree(path / state("exp_avg"))
    else:
        (path / state("exp_avg") / "0.0").unlink()
    np.memmap(path / state("exp_avg_sq") / "0.0", np.float32, "r+")[7] = np.nan
    if what == "an array":
        assert "which would be reset with it, is absent" in refused(capsys, path, tmp_path / "new", "--reset-moments")
        assert "missing_array" in refused(capsys, path, tmp_path / "new", "--from", str(written(ZARR).whole[-1]))
    else:
        assert main(["repair", str(path), "--output", str(tmp_path / "new"), "--reset-moments"]) == 0


# A repair that is killed, and two at once

KILLED = """
import os, signal, sys
from ckpt_patches import cli
from ckpt_patches.audit.repair import copies, repair
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
{change}
sys.exit(cli.main(sys.argv[1:]))
"""
POINTS = {
    "at the first file": "copies.shutil.copyfileobj = kill",
    "at the first element": "repair.write_elements = kill",
    "before the audit of the copy": "repair.repair_list.write = kill",
    "before it gets its name": "repair.os.replace = kill",
    "after it got its name": "repair.sync_folder = kill",
}


def test_a_weight_has_no_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied(written(ZARR).whole[-1], tmp_path)
    (shard, *_) = [own for own in audit(folder, 1).checkpoint.shards if "weight" in own.streams and own.has_rows]
    Path(shard.streams["weight"].extents[0].path).unlink()
    assert audit(folder, 1).verdict == DAMAGED
    assert main(["repair", str(folder), "--output", str(tmp_path / "out")]) == 2
    assert "the checkpoint has nothing to take it from" in capsys.readouterr().err


@pytest.mark.parametrize("change", POINTS.values(), ids=POINTS)
def test_the_next_repair_removes_what_a_killed_one_left(change: str, tmp_path: Path) -> None:
    path, new = copied(written(ZARR).whole[-1], tmp_path), tmp_path / "out" / "new"
    new.parent.mkdir()
    lose_first_moment(path)
    options = ["repair", str(path), "--output", str(new), "--reset-moments"]
    killed = subprocess.run([sys.executable, "-c", KILLED.format(change=change), *options], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert {entry.name for entry in new.parent.iterdir()} - {"new"} == {"new.unfinished"}
    status = 2 if new.exists() else 0
    assert main(options) == status
    assert [entry.name for entry in new.parent.iterdir()] == ["new"]
    assert audit(new).verdict == REPAIRED


def test_of_two_at_once_the_second_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, new = copied(written(ZARR).whole[-1], tmp_path), tmp_path / "new"
    lose_square(path)
    options = ["repair", str(path), "--output", str(new), "--reset-moments"]
    stopped = KILLED.format(
        change="copies.shutil.copyfileobj = lambda *_: (print('now', flush=True), sys.stdin.read())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", stopped, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "now\n"
        assert main(options) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "another repair writes " in line
        first.kill()
    assert main(options) == 0


def test_what_is_not_of_a_repair_is_not_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copied(written(ZARR).whole[-1], tmp_path)
    lose_square(path)
    (tmp_path / "new.unfinished").mkdir()
    (tmp_path / "new.unfinished" / "file").write_text("mine")
    assert "remove it to begin anew" in refused(capsys, path, tmp_path / "new", "--reset-moments")
    assert os.listdir(tmp_path / "new.unfinished") == ["file"]


def test_a_whole_one_is_refused_and_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copied(written(ZARR).whole[-1], tmp_path)
    assert audit(path).verdict == WHOLE
    assert main(["repair", str(path), "--output", str(tmp_path / "new")]) == 0
    assert capsys.readouterr() == ("", f"ckpt-patches: {path} is WHOLE: nothing to repair\n")
    assert main(["repair", str(path), "--output", str(tmp_path / "new"), "--json"]) == 0
    assert "nothing to repair" in json.loads(capsys.readouterr().out)["nothing_to_do"]
    assert not (tmp_path / "new").exists()


def test_a_mistyped_output_makes_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copied(written(ZARR).whole[-1], tmp_path)
    lose_master(path)
    for command in ("repair", "migrate", "to-universal"):
        capsys.readouterr()
        assert main([command, str(path), "--output", str(tmp_path / "typo" / "new")]) == 2
        assert f"expected a folder {tmp_path / 'typo'}, found none" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()
