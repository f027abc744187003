"""An audit interrupted by Ctrl-C, or by the kill of a worker."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from upstream import TIMEOUT

NUMEL = 1 << 31  # elements, in a sparse file


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A zarr checkpoint that takes seconds to read."""
    path = tmp_path / "iter_0000001"
    array = path / "weight"
    array.mkdir(parents=True)
    metadata = {"shape": [NUMEL], "chunks": [NUMEL], "dtype": "<f4", "compressor": None, "filters": None, "order": "C"}
    (array / ".zarray").write_text(json.dumps(metadata))
    with open(array / "0", "wb") as chunk:
        chunk.truncate(4 * NUMEL)
    torch.save({"optimizer": {"param_groups": [{"step": 0}]}}, path / "common.pt")
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    return path


def children(process: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def is_gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("how", "status", "expected"),
    [
        ("a worker is killed", 3, "was killed (SIGKILL) before it was done"),
        ("ctrl-c", 130, "ckpt-patches: interrupted"),
    ],
)
def test_it_ends_in_one_line_and_leaves_no_process(large: Path, how: str, status: int, expected: str) -> None:
    command = [sys.executable, "-m", "ckpt_patches", "audit", str(large)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while len(workers := children(running.pid)) < 2:
        assert running.poll() is None
        time.sleep(0.01)
    if how == "ctrl-c":
        running.send_signal(signal.SIGINT)
    else:
        os.kill(workers[0], signal.SIGKILL)
    out, said = running.communicate(timeout=TIMEOUT)
    assert running.returncode == status
    assert len([line for line in (out + said).splitlines() if expected in line]) == 1
    assert len(said.splitlines()) == (how == "ctrl-c")
    assert all(map(is_gone, workers))
