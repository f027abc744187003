"""Repair: the copy audits as REPAIRED and has the planned values; what would be a guess is refused."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict

from ckpt_patches.audit.audit import DAMAGED, REPAIRED, WHOLE, audit
from ckpt_patches.audit.judging import record_checksums
from ckpt_patches.audit.repair_list import NAME
from ckpt_patches.cli import main
from ckpt_patches.fingerprint import of_training
from ckpt_patches.formats.checkpoint import EXP_AVG, EXP_AVG_SQ, MASTER, MOMENTS, WEIGHT
from ckpt_patches.runtime.units import in_bytes
from crafted_files import Change, both, copied, found_in, without
from dcp_checkpoints import saved
from every_checkpoint import EVERY, in_torch_file
from every_checkpoint import put as put_bytes
from healthy_and_damaged import difference
from megatron_checkpoints import ZARR, ZARR_TP, Configuration, written
from test_audit import FIRST, IN_ZARR, UP, chunk, lose_first_moment, lose_square, put, state
from test_audit_many import Arrays, arrays
from test_audit_many import written as written_by_hand
from test_audit_trainer import run as of_trainer
from test_same_run import of_seed

pytestmark = pytest.mark.slow

HYBRID = Configuration(ranks=2, backend="torch_dist", iterations="0,1", reload="hybrid")
Say = pytest.CaptureFixture[str]


def contents(folder: Path) -> dict[str, str]:
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def listed(output: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((output / NAME).read_text())["repaired"]
    return found


def repair(path: Path, output: Path, *options: object) -> int:
    return main(["repair", str(path), "--output", str(output), *map(str, options)])


def refused(said: Say, path: Path, output: Path, *options: object) -> str:
    """The error of a repair, which leaves nothing and changes nothing."""
    before, beside = contents(path), sorted(output.parent.iterdir())
    said.readouterr()
    assert repair(path, output, *options) == 2
    assert (contents(path), sorted(output.parent.iterdir())) == (before, beside)
    return said.readouterr().err


def check_truth(output: Path, truth: Path, older: Path | None) -> None:
    """Check that all elements are the truth's but the listed ones, which are the older's; or both moments are zero."""
    assert audit(output, 1).verdict == REPAIRED
    assert difference(output, truth, older) == ""


def change(folder: Path, role: str, begin: int, end: int, value: float, files: str = "") -> None:
    """Set elements of the largest parameter, or of all parameters in these files, and update the checksums."""
    found = audit(folder, 1).checkpoint
    shards = [shard for shard in found.shards if role in shard.streams]
    for shard in shards if files else [max(shards, key=lambda shard: shard.numel)]:
        at = 0
        for extent in shard.streams[role].extents:
            own = np.memmap(extent.path, np.float32, "r+", extent.offset, (extent.nbytes // 4,))
            if files in extent.path:
                own[max(begin - at, 0) : max(end - at, 0)] = value
            at += len(own)
    update_checksums(folder)


def update_checksums(folder: Path) -> None:
    for record in audit(folder, 1).checkpoint.records:
        record_checksums.update_checksum(record)


# What is repaired


@pytest.mark.parametrize("run", [ZARR, ZARR_TP], ids=str)
@pytest.mark.parametrize("older", [False, True])
def test_what_races_lost(run: Configuration, older: bool, tmp_path: Path) -> None:
    whole = written(run).whole[-1]
    for path in (path for path in written(run).raced if audit(path).verdict != WHOLE):
        before, output = contents(path), tmp_path / path.name
        options: tuple[object, ...] = ("--from", whole) if older else ("--reset-moments",)
        status = repair(path, output, *options)
        assert contents(path) == before
        assert status == 0 or (status == 2 and not older)  # both moments are lost in a place: nothing to reset there
        if status == 0:
            assert audit(output).verdict == REPAIRED
            assert difference(output, path, whole if older else None) == ""


@pytest.fixture
def zarr(tmp_path: Path) -> Path:
    return copied(written(ZARR).whole[-1], tmp_path)


CHUNK_AND_NAN = both(without(FIRST), put("exp_avg_sq", 7, 8, np.nan))
FILLED: dict[str, Change] = {
    **{name: IN_ZARR[name][0] for name in ("lost first moments", "lost squares", "NaN", "no chunk", "a short chunk")},
    "a chunk, and NaN beside it": CHUNK_AND_NAN,
}


@pytest.mark.parametrize("what", FILLED)
def test_crafted_damage(zarr: Path, tmp_path: Path, what: str, capsys: Say) -> None:
    whole = written(ZARR).whole[-1]
    FILLED[what](zarr)
    every: list[tuple[object, ...]] = [("--reset-moments",), ("--from", whole)]
    for number, options in enumerate(every):
        assert repair(zarr, tmp_path / f"new{number}", *options) == 0
        check_truth(tmp_path / f"new{number}", whole, whole if number else None)
    said = capsys.readouterr()
    size = in_bytes(sum(file.stat().st_size for file in zarr.rglob("*") if file.is_file()))
    assert f"{tmp_path / 'new0'}: copying {size}, and " in said.err
    source = f"an older checkpoint: {whole}, step 3"
    assert source in said.out
    assert {entry["source"] for entry in listed(tmp_path / "new1")} == {source}


def test_lost_elements_that_are_zero_in_the_older_one_are_listed(zarr: Path, tmp_path: Path) -> None:
    """A row without a gradient until the older step is zero in both, and not in the truth."""
    older, truth = copied(zarr, tmp_path / "older"), copied(zarr, tmp_path / "truth")
    row = max(audit(zarr, 1).checkpoint.shards, key=lambda shard: shard.numel).row
    for role in MOMENTS:
        change(older, role, 4 * row, 5 * row, 0.0)
        change(zarr, role, 3 * row + 3, 6 * row + 5, 0.0)
    assert repair(zarr, tmp_path / "new", "--from", older) == 0
    check_truth(tmp_path / "new", truth, older)


def test_lost_squares_that_are_zero_in_the_older_one_too_are_refused(zarr: Path, tmp_path: Path, capsys: Say) -> None:
    """Beside a first moment that is not zero, they would make steps of any size."""
    older = copied(zarr, tmp_path / "older")
    row = max(audit(zarr, 1).checkpoint.shards, key=lambda shard: shard.numel).row
    for role in MOMENTS:
        change(older, role, 4 * row, 5 * row, 0.0)
    change(zarr, EXP_AVG_SQ, 3 * row + 3, 6 * row + 5, 0.0)
    assert "the copy still has lost_moment" in refused(capsys, zarr, tmp_path / "new", "--from", older)


def test_no_other_element_changes(tmp_path: Path, capsys: Say) -> None:
    """Thousands of separate elements."""
    states: Arrays = arrays(20_000, 64)
    states["fp32_param"].reshape(-1)[5::700] = np.nan
    states["exp_avg"].reshape(-1)[77::600] = np.inf
    states["exp_avg_sq"].reshape(-1)[333::900] = -1
    original = arrays(20_000, 64)
    path = written_by_hand(tmp_path / "damaged", states, original["fp32_param"])
    assert repair(path, tmp_path / "new", "--reset-moments") == 0
    weight = original["fp32_param"].astype(ml_dtypes.bfloat16).astype(np.float32).reshape(-1)
    expected = {name: states[name].copy().reshape(-1) for name in states}
    expected["fp32_param"][5::700] = weight[5::700]
    for moment in ("exp_avg", "exp_avg_sq"):  # both are reset where one is damaged
        expected[moment][77::600] = expected[moment][333::900] = 0
    for name, own in expected.items():
        found = np.fromfile(tmp_path / "new" / f"optimizer.state.{name}.layer.weight" / "0.0", np.float32)
        np.testing.assert_array_equal(found, own)
    reset = {*range(77, 1_280_000, 600), *range(333, 1_280_000, 900)}
    count = len(range(5, 1_280_000, 700)) + 2 * len(reset)
    assert f" {count} elements repaired, no other changed" in capsys.readouterr().out


def test_an_older_save_of_another_number_of_ranks(tmp_path: Path) -> None:
    """torch.distributed.checkpoint: the tensors of the older one are not cut, those of the damaged one are."""
    older, truth, path = saved() / "fsdp", saved() / "step-9", copied(saved() / "step-9", tmp_path)
    dcp_to_torch_save(older, tmp_path / "all.pt")
    joined = tmp_path / "joined"
    dcp.save(torch.load(tmp_path / "all.pt", weights_only=False), checkpoint_id=joined, no_dist=True)
    assert len(list(older.glob("*.distcp"))) > len(list(joined.glob("*.distcp")))
    change(path, EXP_AVG, 30, 90, 0.0)
    for number, source in enumerate((older, joined)):
        assert repair(path, tmp_path / f"{number}", "--from", source) == 0
        check_truth(tmp_path / f"{number}", truth, older)


# What is refused


def of_state(array: str) -> Change:
    return without(f"optimizer.state.{array}")


NOTHING, NO_REPAIR = "the checkpoint has nothing to take it from", "no repair: take another checkpoint"
OLD = ("--from", written)  # the last whole one of the run
REFUSED: dict[str, tuple[Change, tuple[Any, ...], str]] = {
    "an array": (of_state(f"exp_avg_sq.{UP}"), (), NO_REPAIR),
    "a weight's array": (without(UP), (), NO_REPAIR),
    "a weight's chunk": (without(f"{UP}/0.0"), (), NOTHING),
    "a long chunk": (IN_ZARR["a long chunk"][0], (), NO_REPAIR),
    "one of two moments, and NaN": (
        both(of_state(f"exp_avg.{UP}"), put("exp_avg_sq", 7, 8, np.nan)),
        ("--reset-moments",),
        "which would be reset with it, is absent",
    ),
    "one of two moments, with an older one": (
        both(of_state(f"exp_avg.{UP}"), put("exp_avg_sq", 7, 8, np.nan)),
        OLD,
        "missing_array",
    ),
    "an array beside what could be filled": (
        both(of_state("exp_avg_sq.module.down.weight"), lose_first_moment),
        OLD,
        "missing_array module.down.weight ",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_repaired_is_said_before_anything_is_written(
    zarr: Path, tmp_path: Path, what: str, capsys: Say
) -> None:
    make, options, expected = REFUSED[what]
    make(zarr)
    own = [written(ZARR).whole[-1] if option is written else option for option in options]
    first, *lines = refused(capsys, zarr, tmp_path / "new", *own).splitlines()
    assert first.startswith(f"ckpt-patches: {zarr} cannot be repaired, and nothing was written")
    assert expected in "\n".join(lines)
    assert all(re.match(r"  \w+ \S", line) for line in lines)  # as in docs/reference/commands.md on `repair`
    assert "lost_moment" not in "\n".join(lines)


def test_a_wrong_checksum_is_not_made_right(tmp_path: Path, capsys: Say) -> None:
    """A bit flip that only the checksum shows is not hidden by the repair of another element of the file."""
    damaged = copied(EVERY["universal of stage 2"].path, tmp_path)
    (place,) = in_torch_file(damaged / "zero/w1.weight/exp_avg.pt")
    put_bytes(place, np.float32(np.nan).tobytes(), first=1)
    with open(place.path, "r+b") as file:
        file.seek(place.offset + 8)
        file.write(bytes([place.data()[8] ^ 1]))
    assert found_in(damaged) == (DAMAGED, {"bad_file", "not_finite"})
    assert "  bad_file " in refused(capsys, damaged, tmp_path / "new", "--reset-moments")


def test_usage(zarr: Path, tmp_path: Path, capsys: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    assert repair(zarr, tmp_path / "new") == 0
    assert capsys.readouterr() == ("", f"ckpt-patches: {zarr} is WHOLE: nothing to repair\n")
    assert repair(zarr, tmp_path / "new", "--json") == 0
    assert "nothing to repair" in json.loads(capsys.readouterr().out)["nothing_to_do"]
    assert not (tmp_path / "new").exists()
    lose_square(zarr)
    assert "--from OLDER" in refused(capsys, zarr, tmp_path / "new")
    assert repair(zarr, zarr) == 2
    assert "expected an output folder outside of" in refused(capsys, zarr, zarr / "new")
    older = copied(zarr, tmp_path / "older")
    said = refused(capsys, zarr, tmp_path / "new", "--from", older)
    assert f"--from {older}: expected a checkpoint that is WHOLE, found it DAMAGED" in said
    before = copied(written(ZARR).whole[-2], tmp_path / "before")
    step = audit(before).checkpoint.step
    lose_first_moment(before)
    said = refused(capsys, before, tmp_path / "new", "--from", written(ZARR).whole[-1])
    assert f"expected {step} at the latest" in said
    for command in ("repair", "migrate", "to-universal"):
        capsys.readouterr()
        assert main([command, str(zarr), "--output", str(tmp_path / "typo" / "new")]) == 2
        assert f"expected a folder {tmp_path / 'typo'}, found none" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 1 << 40, 1000))
    assert re.search(r"needs \d.*, and .* has 1000 B free", refused(capsys, zarr, tmp_path / "new"))


def test_masters_that_no_reload_reached_are_refused(tmp_path: Path, capsys: Say) -> None:
    """Of the real hybrid optimizer's main parameters no one rounds to its weight, and nothing tells which are right."""
    damaged, stepped = written(HYBRID).whole
    assert found_in(damaged) == (DAMAGED, {"unrounded_master", "other_masters"})
    assert audit(stepped).verdict == WHOLE  # the step set the weights from the main parameters
    said = refused(capsys, damaged, tmp_path / "new")
    assert "nothing tells which of the two is right" in said


@pytest.fixture
def zero(tmp_path: Path) -> Path:
    return copied(of_seed(0, 2) / "global_step10", tmp_path / "run")


MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize(
    ("seed", "step", "name"), [(1, 2, MODEL), (0, 2, MODEL), (1, 10, OPTIMIZER)], ids=["a run", "a step", "a rank"]
)
def test_a_file_of_another_run_or_step_is_not_made_to_fit(
    seed: int, step: int, name: str, zero: Path, tmp_path: Path, capsys: Say
) -> None:
    shutil.copy(of_seed(seed, 2) / f"global_step{step}" / name, zero / name)
    for options in [[], ["--from", of_seed(0, 2) / "global_step2"]][: 1 if name == MODEL else 2]:
        said = refused(capsys, zero, tmp_path / "new", *options)
        assert name in said
        assert "nothing tells which of the two is right" in said


@pytest.mark.parametrize("elements", [1, 1 << 40], ids=["one element", "all elements"])
@pytest.mark.parametrize("role", [MASTER, WEIGHT])
def test_main_parameters_that_contradict_their_weights_are_refused(
    role: str, elements: int, zero: Path, tmp_path: Path, capsys: Say
) -> None:
    """Either of the two can be another run's or step's, however few elements show it."""
    found = audit(zero, 1).checkpoint
    shards = [own for own in found.shards if {MASTER, WEIGHT} <= own.streams.keys() and own.numel >= 8]
    shard = min(shards, key=lambda own: own.numel)
    for extent in shard.streams[role].extents:
        with open(extent.path, "r+b") as file:
            file.seek(extent.offset)
            file.write(b"\x40\x40" * (min(extent.nbytes, 4 * elements) // 2))  # about 3, in float32 and bfloat16
    update_checksums(zero)
    assert found_in(zero) == (DAMAGED, {"unrounded_master"})
    for options in ([], ["--from", of_seed(0, 2) / "global_step2"]):
        said = refused(capsys, zero, tmp_path / "new", *options)
        assert "nothing tells which of the two is right" in said
        assert all(Path(own.extents[0].path).name in said for own in (shard.streams[MASTER], shard.streams[WEIGHT]))


def test_all_that_a_rank_holds_is_not_replaced(tmp_path: Path, capsys: Say) -> None:
    """FSDP2: a rank's weights and moments are zeros. Zeros over zeros repair nothing, and older ones are a guess."""
    path = copied(saved() / "fsdp", tmp_path)
    for role in (MASTER, *MOMENTS):
        change(path, role, 0, 1 << 40, 0.0, files="__1_0.distcp")
    assert "zeros over zeros repair nothing" in refused(capsys, path, tmp_path / "new", "--reset-moments")
    said = refused(capsys, path, tmp_path / "new", "--from", saved() / "fsdp")
    assert "expected damage in a small part" in said


def test_a_moment_is_not_filled_where_the_other_is_in_another_file(tmp_path: Path, capsys: Say) -> None:
    """HSDP: the moments of a parameter are in two ranks' files, of which one may be another run's or another step's.

    A token that this run has seen and that one has not is whole rows in one moment alone: all that shows the file.
    """
    truth, path = saved() / "hsdp", copied(saved() / "hsdp", tmp_path)
    found = audit(path, 1).checkpoint
    shards = [shard for shard in found.shards if {*MOMENTS} <= shard.streams.keys() and len(shard.shape) > 1]
    files = [{extent.path for role in MOMENTS for extent in shard.streams[role].extents} for shard in shards]
    shard, two = next((shard, own) for shard, own in zip(shards, files, strict=True) if len(own) == 2)
    (extent,) = shard.streams[EXP_AVG_SQ].extents
    square = np.memmap(extent.path, np.float32, "r+", extent.offset, (shard.numel,))
    square[2 * shard.row : 3 * shard.row] = 0.0
    square.flush()
    update_checksums(path)
    every: list[list[object]] = [[], ["--reset-moments"], ["--from", truth]]
    for options in every:
        said = refused(capsys, path, tmp_path / "new", *options)
        assert all(Path(name).name in said for name in two)
        assert "can be of two runs or steps, of which one had no gradient here" in said


def test_zeros_over_zeros_repair_nothing(zero: Path, tmp_path: Path, capsys: Say) -> None:
    for role in MOMENTS:
        change(zero, role, 5, 35, 0.0)
    assert "zeros over zeros repair nothing" in refused(capsys, zero, tmp_path / "new", "--reset-moments")
    change(zero, EXP_AVG, 50, 60, np.nan)
    for options in ([], ["--reset-moments"]):
        said = refused(capsys, zero, tmp_path / "new", *options)
        assert "zeros over zeros repair nothing: repeat with --from OLDER" in said


def test_a_reset_is_refused_and_names_the_neighbor_that_has_the_moments(
    zero: Path, tmp_path: Path, capsys: Say
) -> None:
    truth = Path(shutil.copytree(zero, tmp_path / "truth"))
    change(zero, EXP_AVG_SQ, 5, 35, 0.0)
    for step in (2, 50):
        shutil.copytree(of_seed(0, 2) / f"global_step{step}", zero.parent / f"global_step{step}")
    shutil.copytree(of_seed(1, 2) / "global_step10", zero.parent / "of_another_run")
    older = zero.parent / "global_step2"
    assert f"repeat with --from {older}, " in refused(capsys, zero, tmp_path / "new")
    assert repair(zero, tmp_path / "new", "--from", older) == 0
    check_truth(tmp_path / "new", truth, older)
    assert repair(zero, tmp_path / "reset", "--reset-moments") == 0
    check_truth(tmp_path / "reset", truth, None)
    change(older, EXP_AVG, 0, 1, np.nan)
    assert "--from OLDER" in refused(capsys, zero, tmp_path / "other")


def test_a_damaged_part_of_what_is_resumed_from_as_one_is_named(zero: Path, tmp_path: Path, capsys: Say) -> None:
    """Beside the Trainer's own files DeepSpeed's folder is a checkpoint of its own, with the optimizer."""
    trainers = of_trainer(tmp_path / "trainer", ranks=2).rename(tmp_path / "trainer" / "checkpoint-10")
    (trainers / "optimizer.pt").unlink()
    (trainers / "trainer_state.json").write_text('{"global_step": 10}')
    part = Path(shutil.copytree(zero, trainers / zero.name))
    assert repair(trainers, tmp_path / "new", "--reset-moments") == 0  # "nothing to repair"
    change(part, EXP_AVG_SQ, 5, 35, 0.0)
    said = refused(capsys, trainers, tmp_path / "new", "--reset-moments")
    assert f"resumes from it together with {part}, which is DAMAGED: repair that one" in said
    assert main(["audit", str(trainers.parent), "--html", str(tmp_path / "page.html")]) == 1
    command = f"ckpt-patches repair {part} --output NEW --from OLDER"
    assert f"To repair a newer one: {command}<" in (tmp_path / "page.html").read_text()
    assert repair(part, tmp_path / "new", "--reset-moments") == 0


def state_of_adam() -> dict[str, Any]:
    moments = {"exp_avg": torch.randn(64, 64) / 1000, "exp_avg_sq": torch.rand(64, 64) / 1e6 + 1e-8}
    return {**torch.optim.AdamW([torch.zeros(64, 64)]).state_dict(), "state": {0: {"step": 10.0, **moments}}}


@pytest.mark.parametrize("lost", ["a", "b", "ab"])
def test_each_of_several_optimizers_in_a_file_is_repaired_by_itself(lost: str, tmp_path: Path, capsys: Say) -> None:
    """Without ZeRO a file can have a dict of optimizers, whose parameters have the same numbers."""
    path, optimizers = tmp_path / "global_step10", {name: state_of_adam() for name in "ab"}
    for name in lost:
        optimizers[name]["state"][0]["exp_avg_sq"].view(-1)[101:501] = 0
    weights = {name: torch.randn(64, 64) for name in "ab"}
    counts = {"global_steps": 10, "skipped_steps": 0, "dp_world_size": 1, "mp_world_size": 1}
    path.mkdir()
    torch.save(
        {"module": weights, "optimizer": optimizers, "lr_scheduler": None, "ds_config": {}, **counts},
        path / "mp_rank_00_model_states.pt",
    )
    output = tmp_path / "new"
    assert repair(path, output, "--reset-moments") == 0
    assert audit(output).verdict == REPAIRED
    found = torch.load(output / "mp_rank_00_model_states.pt")["optimizer"]
    for name, own in optimizers.items():
        for role in MOMENTS:
            expected = own["state"][0][role].flatten()
            expected[101:501] *= name not in lost
            assert torch.equal(found[name]["state"][0][role].flatten(), expected)


def test_arrays_of_one_name_are_not_told_apart(tmp_path: Path, capsys: Say) -> None:
    path = of_trainer(tmp_path / "run")
    value = torch.load(path / "optimizer.pt")
    torch.save(value, path / "optimizer.bin")
    torch.save({}, path / "random_states_0.pkl")
    value["state"][0]["exp_avg_sq"].view(-1)[101:201] = 0
    torch.save(value, path / "optimizer.pt")
    assert "or another array of this name" in refused(capsys, path, tmp_path / "new", "--reset-moments")


def times_4(name: str, state: str) -> Change:
    def make(states: Any) -> None:
        states[name][state][40:] *= 4

    return make


def lose_squares(states: Any) -> None:
    states["0.weight"]["exp_avg_sq"].view(-1)[100:500] = 0


RECORDED: dict[str, tuple[Change, str]] = {
    "a lost slice": (lose_squares, ""),
    "and the other moment": (
        both(lose_squares, times_4("0.weight", "exp_avg")),
        "not_as_recorded 0.weight : exp_avg: ",
    ),
    "and another parameter": (both(lose_squares, times_4("1.weight", "exp_avg_sq")), "not_as_recorded 1.weight : "),
}


@pytest.mark.parametrize("what", RECORDED)
def test_only_what_is_lost_may_differ_from_the_record(what: str, tmp_path: Path, capsys: Say) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 48))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(64, 64)).square().mean().backward()
        optimizer.step()
    record = of_training(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    make, expected = RECORDED[what]
    make(states["state"])
    path = tmp_path / "step_3"
    dcp.save(
        {"model": weights, "optimizer": states, "ckpt_patches_fingerprint": record}, checkpoint_id=path, no_dist=True
    )
    assert audit(path).verdict == DAMAGED
    if expected:
        assert expected in refused(capsys, path, tmp_path / "new", "--reset-moments")
    else:
        assert repair(path, tmp_path / "new", "--reset-moments") == 0
        assert audit(tmp_path / "new").verdict == REPAIRED


# The list of what was repaired


def test_the_list_is_of_this_checkpoint_alone(zarr: Path, tmp_path: Path) -> None:
    """Without it a reset is damage; beside another checkpoint it is stale, and hides nothing; one can be added to."""
    other = copied(zarr, tmp_path / "other")
    lose_first_moment(zarr)
    once, twice = tmp_path / "once", tmp_path / "twice"
    assert repair(zarr, once, "--reset-moments") == 0
    assert {finding.kind.name for finding in audit(once).findings} >= {"repaired"}
    shutil.copy(once / NAME, other / NAME)
    assert {finding.kind.name for finding in audit(other).findings} >= {"stale_list"}
    assert audit(other).verdict == WHOLE
    chunk(other, state("exp_avg"))[:90] = 0
    assert audit(other).verdict != WHOLE
    kept = (once / NAME).rename(tmp_path / "elsewhere")
    assert audit(once).verdict != WHOLE
    kept.rename(once / NAME)
    chunk(once, state("exp_avg"))[500] = np.nan
    assert repair(once, twice, "--reset-moments") == 0
    assert audit(twice).verdict == REPAIRED
    assert [len(own["ranges"]) for own in (*listed(once), *listed(twice))] == [1, 1, 2, 2]  # of both moments


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"repaired": [], "files": {"../x": [1, 2]}}', b'{"repaired": 3}'])
def test_a_list_of_another_making_is_none(zarr: Path, content: bytes) -> None:
    (zarr / NAME).write_bytes(content)
    assert audit(zarr).verdict == WHOLE
    assert "stale_list" in {finding.kind.name for finding in audit(zarr).findings}


# The copy


def test_the_copy_has_the_files_and_their_modes(zarr: Path, tmp_path: Path) -> None:
    lose_first_moment(zarr)
    (zarr / "notes").mkdir()
    (zarr / "notes" / "log").write_text("mine")
    (zarr / "notes" / "link").symlink_to("log")
    os.chmod(zarr / "notes", 0o750)
    os.chmod(zarr / "notes" / "log", 0o440)
    assert repair(zarr, tmp_path / "new", "--reset-moments") == 0
    before, after = contents(zarr), contents(tmp_path / "new")
    assert {name for name in before if before[name] != after.get(name)} - {FIRST, f"{state('exp_avg_sq')}/0.0"} == {
        name for name in before if ".sync/" in name
    }
    assert not (tmp_path / "new" / "notes" / "link").is_symlink()
    modes = [(tmp_path / "new" / name).stat().st_mode & 0o777 for name in ("notes", "notes/log")]
    assert modes == [0o750, 0o640]  # the owner can write to a copy


@pytest.mark.parametrize("what", ["a file", "a folder", "a pipe"])
def test_what_leads_out_or_is_no_file_is_not_copied(what: str, zarr: Path, tmp_path: Path, capsys: Say) -> None:
    lose_first_moment(zarr)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "file").write_text("secret")
    if what == "a pipe":
        os.mkfifo(zarr / "pipe")
    else:
        (zarr / "link").symlink_to(tmp_path / "secret" / ("file" if what == "a file" else ""))
    assert repair(zarr, tmp_path / "new", "--reset-moments") == 2
    expected = "expected a regular file, found a pipe" if what == "a pipe" else "outside of the checkpoint"
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


# A repair that is killed, and two at once

WITH_HOOK = """
import os, signal, sys
from ckpt_patches import cli
seen, output, at = [], sys.argv.pop(1), int(sys.argv.pop(1))
def note(event, values):
    path = str(values[-2] if event == "os.rename" else values[0]) if values else ""
    writes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir") or (event == "open" and values[2] & 3)
    if writes and output in path:
        seen.append(path)
        if len(seen) == at:
            {action}
sys.addaudithook(note)
status = cli.main(sys.argv[1:])
print(len(seen))
sys.exit(status)
"""


def with_hook(action: str, output: Path, at: int, *options: object) -> list[str]:
    """The command that repairs, and does something at the n-th write to the output."""
    return [sys.executable, "-c", WITH_HOOK.format(action=action or "pass"), str(output), str(at), *map(str, options)]


def test_the_next_repair_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    path, new = copied(written(ZARR).whole[-1], tmp_path), tmp_path / "out" / "new"
    new.parent.mkdir()
    lose_first_moment(path)
    options = ("repair", path, "--output", new, "--reset-moments")
    done = subprocess.run(with_hook("", new, 0, *options), capture_output=True, text=True, check=True)
    reference, count = contents(new), int(done.stdout.splitlines()[-1])
    assert count > 40
    for at in (2, 3, count // 2, count - 3, count - 2, count - 1, count):
        shutil.rmtree(new)
        killed = subprocess.run(with_hook("os.kill(os.getpid(), signal.SIGKILL)", new, at, *options), check=False)
        assert killed.returncode == -signal.SIGKILL
        assert all(re.fullmatch(r"new(-\w+\.unfinished)?", entry.name) for entry in new.parent.iterdir())
        expected = 2 if new.exists() else 0
        assert main([str(option) for option in options]) == expected
        assert [entry.name for entry in new.parent.iterdir()] == ["new"]
        assert contents(new) == reference


def test_of_two_at_once_the_second_says_so(tmp_path: Path, capsys: Say) -> None:
    path, new = copied(written(ZARR).whole[-1], tmp_path), tmp_path / "new"
    lose_square(path)
    options = ("repair", path, "--output", new, "--reset-moments")
    stopped = with_hook("print('now', flush=True); sys.stdin.read()", new, 5, *options)
    with subprocess.Popen(stopped, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "now\n"
        assert repair(path, new, "--reset-moments") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "another repair writes " in line
        first.kill()
    assert repair(path, new, "--reset-moments") == 0
