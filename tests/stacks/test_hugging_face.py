"""Transformers' Trainer and Accelerate with ZeRO 2 and 3: resumes, also universal ones, begin with the saved state.

Each test takes one to two minutes. `hugging_face.py` is the run. docs/guides/hugging_face.md shows the commands.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trainers.ranks import free_port

PROGRAM = Path(__file__).with_name("hugging_face.py")
ALL = ["saved", "end"]
TIMEOUT = 1800.0  # seconds; a run takes about ten


@dataclass(frozen=True)
class Stack:
    """Runs of one configuration in an environment. All runs use the checkpoint of the first run."""

    bin: Path
    folder: Path
    options: tuple[str, ...]

    @property
    def accelerate(self) -> bool:
        return "--accelerate" in self.options

    def run(self, mode: str, ranks: int, **env: str) -> Any:
        """The states that differ from the states of the first run, by moment."""
        launcher: list[str | Path] = [self.bin / "python", "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
        program: tuple[str | Path, ...] = (f"--master-port={free_port()}", PROGRAM, self.folder, mode, *self.options)
        done = self.command(*launcher, *program, **env)
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        assert ("resume verified: " in done.stdout + done.stderr) is (
            mode != "first" and env.get("CKPT_PATCHES") != "off"
        )
        return json.loads(done.stdout.splitlines()[-1])

    def command(self, *command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CKPT_PATCHES", "PYTHON"))}
        cpu = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        environ = {**kept, **cpu, "CKPT_PATCHES": "strict", "CKPT_PATCHES_FINGERPRINT": "1", **env}
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT)

    @property
    def saved(self) -> Path:
        """The DeepSpeed folder that the first run has saved."""
        return self.folder / ("state/pytorch_model" if self.accelerate else "checkpoint-3/global_step3")

    def convert(self) -> None:
        """Convert in a copy. The universal folder replaces the original, because Accelerate loads only that name."""
        output = self.saved.with_name("universal")
        if self.accelerate:
            shutil.copytree(self.folder / "state", self.folder / "resume-state")
            copy = self.folder / "universal-state"
            shutil.copytree(self.folder / "state", copy, ignore=shutil.ignore_patterns("pytorch_model"))
            output = copy / "pytorch_model"
        folders = ("--input-folder", self.saved, "--output-folder", output)
        done = self.command(self.bin / "ckpt-patches", "to-universal", *folders)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def stack(tmp_path: Path, environment_of: Callable[[str], Path], request: pytest.FixtureRequest) -> Stack:
    options: str = request.param
    made = Stack(environment_of("hugging_face"), tmp_path, tuple(options.split()))
    made.run("first", 2)
    made.convert()
    return made


@pytest.mark.parametrize(
    "stack",
    [
        "--stage 2",
        "--stage 3",
        "--stage 2 --round-robin",
        "--stage 2 --lora",
        "--stage 3 --lora",
        "--stage 2 --accelerate",
        "--stage 3 --accelerate",
    ],
    indirect=True,
)
def test_each_resume_begins_with_what_was_saved(stack: Stack) -> None:
    audit = stack.command(stack.bin / "ckpt-patches", "audit", stack.saved)
    assert (audit.returncode, "WHOLE" in audit.stdout) == (0, True), audit.stdout
    assert stack.run("resume", 2) == {"saved": [], "end": []}
    assert stack.run("universal", 2) == {"saved": [], "end": []}
    # Three ranks sum their gradients in another order, so the end may differ.
    assert stack.run("universal", 3)["saved"] == []


@pytest.mark.parametrize("stack", ["--stage 2 --round-robin"], indirect=True)
def test_without_the_fixes_a_universal_resume_with_round_robin_gradients_is_another_run(stack: Stack) -> None:
    """Without the fixes, the test above would see this difference."""
    assert len(stack.run("universal", 3, CKPT_PATCHES="off")["saved"]) > 10
