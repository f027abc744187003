"""Names and files of a checkpoint that could deceive or block whoever audits it."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_patches.audit.audit import DAMAGED, UNKNOWN, WHOLE, audit
from ckpt_patches.audit.repair.copies import copy_checkpoint
from ckpt_patches.cli.command_line import main
from crafted_files import change, found_in
from every_checkpoint import EVERY
from test_audit_trainer import run
from upstream import newest
from zero_checkpoints import trained

NAN = torch.tensor([1.0, float("nan")])
FORGED = "w\x1b[2K\x1b[1A\r/x: WHOLE (fine)\u202e\x1b[8m"


def saved(folder: Path, name: str) -> Path:
    dcp.save({"model": {name: NAN}}, checkpoint_id=folder)
    return folder


def test_half_a_character_is_no_name_of_a_file(tmp_path: Path) -> None:
    index = saved(tmp_path / "saved", "w") / ".metadata"
    index.write_bytes(index.read_bytes().replace(b"__0_0.distcp", b"__0_0\xed\xa0\x80stcp"))
    details = [one.detail for one in audit(tmp_path / "saved").findings]
    assert [own for own in details if "expected the name of a file in this folder, found '__0_0\\ud800stcp'" in own]


@pytest.mark.parametrize("command", ["audit", "fingerprint"])
def test_a_name_cannot_change_other_lines(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([command, str(saved(tmp_path / "saved", FORGED))])
    lines = capsys.readouterr().out.splitlines()
    assert "\\x1b[2K" in "".join(lines)
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("options", [[], ["--json"]], ids=str)
def test_a_name_of_a_megabyte_is_shortened(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", *options, str(saved(tmp_path / "saved", "w" * 1_000_000))]) == 1
    out = capsys.readouterr().out
    assert len(out) < 50_000
    assert not options or json.loads(out)["checkpoints"][0]["verdict"] == DAMAGED


def of_zarr(folder: Path) -> None:
    array = folder / "layer.weight"
    array.mkdir()
    described = {"shape": [4], "chunks": [2], "dtype": "<f4", "compressor": None, "filters": None, "order": "C"}
    (array / ".zarray").write_text(json.dumps(described))
    for chunk in "01":
        (array / chunk).write_bytes(bytes(range(8)))
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    torch.save({"iteration": 3}, folder / "common.pt")


def of_dcp(folder: Path) -> None:
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=folder)


def of_safetensors(folder: Path) -> None:
    name = "model-00001-of-00001.safetensors"
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / name).write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(8)))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))


def of_fsdp(folder: Path) -> None:
    torch.save({"w": torch.ones(3)}, folder / "model_world_size_1_rank_0.pt")
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 1}))


def of_trainer(folder: Path) -> None:
    shutil.copytree(run(folder.parent / "run"), folder, dirs_exist_ok=True)


def of(kind: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        shutil.copytree(EVERY[kind].path, folder, dirs_exist_ok=True)

    return make


of_zero, of_torch_dist, of_universal = of("stage 2"), of("0.14, torch_dist"), of("universal of stage 2")


def pipe(file: Path, _: Path) -> None:
    os.mkfifo(file)


def device(file: Path, _: Path) -> None:
    file.symlink_to("/dev/zero")


def sparse(file: Path, _: Path) -> None:
    file.touch()
    os.truncate(file, 1 << 40)


def folder_in_place(file: Path, _: Path) -> None:
    file.mkdir()


def link_to_itself(file: Path, _: Path) -> None:
    file.symlink_to(file.name)


def link_outside(file: Path, outside: Path) -> None:
    file.symlink_to(outside)


FILES = [
    (of_zarr, "metadata.json"),
    (of_zarr, "common.pt"),
    (of_zarr, "layer.weight/.zarray"),
    (of_zarr, "layer.weight/0"),
    (of_dcp, ".metadata"),
    (of_dcp, "__0_0.distcp"),
    (of_safetensors, "model.safetensors.index.json"),
    (of_safetensors, "model-00001-of-00001.safetensors"),
    (of_fsdp, "fsdp_config.json"),
    (of_fsdp, "model_world_size_1_rank_0.pt"),
    (of_zero, "mp_rank_00_model_states.pt"),
    (of_zero, "*_rank_0_mp_rank_00_optim_states.pt"),
    (of_torch_dist, "metadata.json"),
    (of_torch_dist, "common.pt"),
    (of_torch_dist, ".metadata"),
    (of_torch_dist, "__0_0.distcp"),
    (of_universal, "mp_rank_00_model_states.pt"),
    (of_universal, "zero/w1.weight/fp32.pt"),
    *((of_trainer, name) for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")),
    (of_trainer, "trainer_state.json"),
    *((make, "ckpt-patches-repaired.json") for make in (of_zarr, of_dcp, of_safetensors, of_fsdp)),
]


@pytest.mark.parametrize("other", [pipe, device, sparse, folder_in_place, link_to_itself, link_outside])
@pytest.mark.parametrize(("make", "name"), FILES)
def test_what_is_no_plain_file_is_an_error_and_never_read(
    make: Callable[[Path], None], name: str, other: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    folder, outside = tmp_path / "saved", tmp_path / "outside"
    folder.mkdir()
    make(folder)
    assert audit(folder).verdict in (WHOLE, UNKNOWN)  # UNKNOWN: this is no optimizer's whole state
    file = next(folder.glob(name), folder / name)
    if file.exists():
        file.rename(outside)
    other(file, outside)
    signal.alarm(20)
    try:
        found = audit(folder)
    finally:
        signal.alarm(0)
    assert found.verdict != WHOLE or name == "ckpt-patches-repaired.json"
    assert not [finding for finding in found.findings if "defect" in finding.detail]


OUTSIDE = {"a chunk": "0", "the metadata": ".zarray", "a folder in it": "inner", "the array": ""}


@pytest.mark.parametrize("what", OUTSIDE)
def test_a_link_of_a_zarr_array_that_leaves_the_checkpoint_is_not_read(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    of_zarr(folder)
    outside = Path(shutil.copytree(folder / "layer.weight", tmp_path / "outside"))
    (outside / "inner").mkdir()
    link, to = folder / "layer.weight" / OUTSIDE[what], outside / OUTSIDE[what]
    if link.exists():
        shutil.rmtree(link) if link.is_dir() else link.unlink()
    link.symlink_to(to)
    report = audit(folder)
    assert report.verdict == UNKNOWN
    assert [one.kind.name for one in report.findings if "outside of the checkpoint" in one.detail] == ["not_read"]
    assert main(["repair", str(folder), "--output", str(tmp_path / "copy")]) != 0
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"dimension_separator": "/../../../"},
        {"dimension_separator": None},
        {"chunks": [True]},
        {"shape": "4"},
        {"shape": [4.0]},
        {"shape": [1] * 100, "chunks": [1] * 100},
    ],
    ids=str,
)
def test_a_zarr_array_with_wrong_metadata_is_damaged(fields: dict[str, Any], tmp_path: Path) -> None:
    of_zarr(tmp_path)
    file = tmp_path / "layer.weight/.zarray"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    assert found_in(tmp_path) == (DAMAGED, {"bad_metadata"})


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "*_rank_0_mp_rank_00_optim_states.pt"])
def test_a_file_of_zero_that_is_a_link_out_of_the_checkpoint_is_not_read(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(trained(newest("deepspeed"), "stage2")["stage2"], tmp_path / "saved")
    (file,) = folder.glob(name)
    file.rename(folder / "inside")
    file.symlink_to("inside")
    assert audit(folder).verdict == WHOLE
    (folder / "inside").rename(tmp_path / "outside")
    file.unlink()
    file.symlink_to(tmp_path / "outside")
    found = audit(folder)
    assert found.verdict in (UNKNOWN, DAMAGED)
    assert [one.kind.name for one in found.findings if "outside of the checkpoint" in one.detail] == ["not_read"]


def test_files_of_millions_of_experts_are_not_all_named(tmp_path: Path) -> None:
    of_zero(tmp_path)
    change(tmp_path / "mp_rank_00_model_states.pt", lambda value: value.update(num_experts=[3, 1_000_000, 1_000_000]))
    absent = [one for one in audit(tmp_path).findings if "_expert_" in one.array or one.array == "experts"]
    assert absent[3].array == "layer_1_expert_0_mp_rank_00_model_states.pt"
    assert (len(absent), absent[-1].detail) == (20_001, "more than 20000 files are missing")
    assert {one.kind.name for one in absent} == {"missing_weight"}


def test_links_within_a_checkpoint_do_not_double_the_copy(tmp_path: Path) -> None:
    """Each of thirty folders has two links to the next."""
    of_dcp(folder := tmp_path / "saved")
    for number in range(30):
        (folder / f"d{number}").mkdir()
        for link in "ab":
            (folder / f"d{number}" / link).symlink_to(f"../d{number + 1}")
    (folder / "d30").mkdir()
    (folder / "d30" / "notes").write_text("mine")
    copy_checkpoint(folder, tmp_path / "copy", tmp_path / "new", print)
    folder.rename(tmp_path / "moved")
    copied = (tmp_path / "copy").rename(tmp_path / "new")
    assert sum(len(files) for _, _, files in os.walk(copied)) == 3
    for number in range(31):
        links = ["ab"[level % 2] for level in range(30 - number)]
        assert copied.joinpath(f"d{number}", *links, "notes").read_text() == "mine"


def test_a_universal_checkpoint_whose_model_is_no_dict(tmp_path: Path) -> None:
    of_universal(tmp_path / "checkpoint")
    change(tmp_path / "checkpoint" / "mp_rank_00_model_states.pt", lambda value: value.update(module=3))
    assert found_in(tmp_path / "checkpoint") == (DAMAGED, {"missing_weight"})
