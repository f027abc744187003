"""Names and files of a checkpoint that could deceive or block whoever audits it."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_patches.audit.audit import DAMAGED, audit
from ckpt_patches.cli.command_line import main

NAN = torch.tensor([1.0, float("nan")])
FORGED = "w\x1b[2K\x1b[1A\r/x: WHOLE (fine)\u202e\x1b[8m"


def saved(folder: Path, name: str) -> Path:
    dcp.save({"model": {name: NAN}}, checkpoint_id=folder)
    return folder


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


def test_a_pipe_in_place_of_a_rank_s_file_is_refused(tmp_path: Path) -> None:
    (data,) = saved(tmp_path, "w").glob("*.distcp")
    data.unlink()
    os.mkfifo(data)
    assert audit(tmp_path).verdict == DAMAGED


def test_a_pipe_in_place_of_weights_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    assert audit(tmp_path).verdict == DAMAGED
