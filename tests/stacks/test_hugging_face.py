"""Transformers' Trainer and Accelerate with ZeRO 2 and 3: resumes, also universal ones, begin with the saved state.

Each test takes one to two minutes. `hugging_face.py` is the run. docs/guides/other_ranks.md shows the commands.
"""

import json
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stacks.__main__ import HUGGING_FACE, REPOSITORY, make, pip
from trainers.ranks import free_port

PROGRAM = Path(__file__).with_name("hugging_face.py")
TIMEOUT = 1800.0  # seconds; a run takes about ten
OPTIONS = ("--stage 2", "--stage 3", "--stage 2 --round-robin", "--stage 2 --lora", "--stage 3 --lora")


@pytest.fixture(scope="session")
def environment() -> Path:
    folder = make("hugging_face", HUGGING_FACE)
    pip(folder, "--force-reinstall", "--no-deps", str(REPOSITORY))
    return folder / "bin"


def command(*command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CKPT_PATCHES", "PYTHON"))}
    cpu = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environ = {**kept, **cpu, "PYTHONPATH": str(REPOSITORY / "tests"), "CKPT_PATCHES_FINGERPRINT": "1"}
    return subprocess.run(
        command, env={**environ, "CKPT_PATCHES": "strict", **env}, capture_output=True, text=True, timeout=TIMEOUT
    )


def run(bin: Path, folder: Path, options: list[str], mode: str, ranks: int, **env: str) -> dict[str, Any]:
    """The states that differ from those of the first run, by moment."""
    launcher = (bin / "python", "-m", "torch.distributed.run", f"--nproc-per-node={ranks}")
    done = command(*launcher, f"--master-port={free_port()}", PROGRAM, folder, mode, *options, **env)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    is_verified = mode != "first" and env.get("CKPT_PATCHES") != "off"
    assert ("resume verified: " in done.stdout + done.stderr) is is_verified
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    return {moment: different for line in lines for moment, different in line.items()}


def convert(bin: Path, folder: Path, saved: Path) -> None:
    """Convert in a copy. The universal folder replaces the original, because Accelerate loads only that name."""
    output = saved.with_name("universal")
    if saved.name == "pytorch_model":
        shutil.copytree(folder / "state", folder / "resume-state")
        copy = folder / "universal-state"
        shutil.copytree(folder / "state", copy, ignore=shutil.ignore_patterns("pytorch_model"))
        output = copy / "pytorch_model"
    done = command(bin / "ckpt-patches", "to-universal", "--input-folder", saved, "--output-folder", output)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("options", [*OPTIONS, "--stage 2 --accelerate", "--stage 3 --accelerate"])
def test_each_resume_begins_with_what_was_saved(options: str, environment: Path, tmp_path: Path) -> None:
    train = partial(run, environment, tmp_path, options.split())
    train("first", 2)
    saved = tmp_path / ("state/pytorch_model" if "--accelerate" in options else "checkpoint-3/global_step3")
    convert(environment, tmp_path, saved)
    audit = command(environment / "ckpt-patches", "audit", saved)
    assert (audit.returncode, "WHOLE" in audit.stdout) == (0, True), audit.stdout
    assert train("resume", 2) == {"saved": [], "end": []}
    assert train("universal", 2) == {"saved": [], "end": []}
    # Three ranks sum their gradients in another order, so the end may differ.
    assert train("universal", 3)["saved"] == []
    if "--round-robin" in options:  # without the fixes, this test would see the difference
        assert len(train("universal", 3, CKPT_PATCHES="off")["saved"]) > 10
