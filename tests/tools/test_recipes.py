"""The recipes of docs/guides/resume_from.md, run as they are; a cluster's folders are replaced by those of the test.

`sbatch`, `srun` and the kubelet are stand-ins that run what they are given on this machine. `torchrun` is torch's own,
with one process for each GPU that a recipe asks for divided by eight.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from torch import nn
from torch.distributed.fsdp import fully_shard

from every_checkpoint import EVERY
from plain_runs import save
from upstream import REPOSITORY, TIMEOUT

PAGE = (REPOSITORY / "docs" / "guides" / "resume_from.md").read_text(encoding="utf-8")
# What a training script does with the option: it loads the state with torch itself.
TRAIN = """
import argparse, json, sys
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict

parser = argparse.ArgumentParser()
for name in ("--resume", "--load", "--save", "--ckpt-step"):
    parser.add_argument(name)
options = vars(parser.parse_args())
if options["resume"]:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    states = get_state_dict(model, optimizer)
    checkpoint.load({"model": states[0], "optimizer": states[1]}, checkpoint_id=options["resume"])
    options["step"] = float(states[1]["state"]["0.weight"]["step"])
print(json.dumps(options))
"""


def recipe(title: str) -> str:
    (found,) = re.findall(rf"^### {title}\n.*?^```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A folder with commands, and with a training script in the current folder of jobs."""
    commands = tmp_path / "bin"
    commands.mkdir()
    scripts = {
        "ckpt-patches": f'exec "{sys.executable}" -m ckpt_patches "$@"',
        "sbatch": 'SLURM_NNODES=1 SLURM_JOB_ID=7 exec bash "$1"',
        "srun": 'exec "$@"',
        "hostname": "echo localhost:0",
        "torchrun": f'exec "{sys.executable}" -m torch.distributed.run "${{@/#8/1}}"',
    }
    for name, body in scripts.items():
        (commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands / name).chmod(0o755)
    for name in ("train.py", "pretrain_gpt.py"):
        (tmp_path / name).write_text(TRAIN)
    return tmp_path


def started(cluster: Path, *command: str | Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    own = {**os.environ, "PATH": f"{cluster / 'bin'}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command,
        cwd=cluster,
        env={**own, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT,
    )


def options_of(done: "subprocess.CompletedProcess[str]") -> Any:
    """The options that the training got."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def spoil(run: Path) -> None:
    for path in run.glob("*/*"):
        if path.is_file() and path.stat().st_size > 1000:
            os.truncate(path, 10)


# Shells


@pytest.mark.slow
def test_sbatch(cluster: Path) -> None:
    run = cluster / "checkpoints of a team"
    script = cluster / "job.sh"
    script.write_text(recipe("sbatch").replace("/checkpoints/run1", f'"{run}"'))
    first = options_of(started(cluster, "sbatch", script))
    assert (first["save"], first["load"], first["ckpt_step"]) == (str(run), None, None)
    path = EVERY["0.14, torch_dist"].path
    shutil.copytree(path, run / path.name)
    (run / "iter_0000009").mkdir()  # a save that did not begin
    again = options_of(started(cluster, "sbatch", script))
    assert (again["load"], again["ckpt_step"]) == (str(run), str(int(path.name.removeprefix("iter_"))))
    spoil(run)
    done = started(cluster, "sbatch", script)
    assert (done.returncode, done.stdout) == (1, "")
    assert "is verified as good" in done.stderr


@pytest.mark.slow
def test_torchrun(cluster: Path) -> None:
    run, script = cluster / "a run", cluster / "resume.sh"
    script.write_text(recipe("torchrun"))
    command = ("bash", script, run, "torchrun", "--nproc-per-node", "8", "--standalone", "train.py")
    assert options_of(started(cluster, *command))["resume"] is None
    save(run, 2)
    newest = save(run, 4, damaged=True)
    found = options_of(started(cluster, *command))
    assert (found["resume"], found["step"]) == (str(run / "step-2"), 2.0)
    spoil(run)
    done = started(cluster, *command)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"skipped {newest}: DAMAGED" in done.stderr


def kubelet(cluster: Path, text: str) -> "subprocess.CompletedProcess[str]":
    """Run the containers of a pod: the next one starts if the one before it succeeded."""
    pod = yaml.safe_load(text)["spec"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in (*pod["initContainers"], *pod["containers"]):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        done = started(cluster, *container["command"], *container.get("args", ()))
        if done.returncode:
            break
    return done


@pytest.mark.slow
def test_kubernetes(cluster: Path) -> None:
    run = cluster / "checkpoints" / "run1"
    (cluster / "resume").mkdir()
    text = re.sub(r"(?<![\w.])/(checkpoints|resume)\b", rf"{cluster}/\1", recipe("Kubernetes"))
    assert options_of(kubelet(cluster, text))["resume"] is None
    save(run, 2)
    found = options_of(kubelet(cluster, text))
    assert (found["resume"], found["step"]) == (str(run / "step-2"), 2.0)
    spoil(run)
    done = kubelet(cluster, text)
    assert (done.returncode, done.stdout) == (1, "")
    assert "is verified as good" in done.stderr


# Python


class Data(torch.utils.data.Dataset[Mapping[str, torch.Tensor]]):
    """Sixteen fixed rows."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Mapping[str, torch.Tensor]:
        return {"x": torch.full((4,), float(index))}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return {"loss": self.layer(x).square().mean()}


def test_transformers(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers", reason="Transformers is not installed here")

    def trained(steps: int) -> Any:
        torch.manual_seed(0)
        settings = transformers.TrainingArguments(
            output_dir=str(tmp_path / "run"), max_steps=steps, save_steps=2, report_to=[], use_cpu=True
        )
        trainer = transformers.Trainer(model=Small(), args=settings, train_dataset=Data())
        began: list[int] = []

        class Began(transformers.TrainerCallback):
            def on_step_begin(self, _args: Any, state: Any, _control: Any, **_others: Any) -> None:
                began.append(state.global_step)

        trainer.add_callback(Began())
        exec(recipe("Transformers"), {"trainer": trainer})
        return began

    assert trained(4) == [0, 1, 2, 3]
    (tmp_path / "run" / "checkpoint-4" / "optimizer.pt").write_bytes(b"")
    assert trained(5) == [2, 3, 4]


def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lightning: Any = pytest.importorskip("lightning", reason="Lightning is not installed here")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()

    class Module(lightning.LightningModule):
        def configure_model(self) -> None:
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 4)
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, _index: int) -> Any:
            began.append(self.global_step)
            return self.layer(batch["x"]).square().mean()

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Data(), batch_size=2)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    began: list[int] = []
    for steps in (2, 4, 5):
        began.clear()
        kept = lightning.pytorch.callbacks.ModelCheckpoint(
            "checkpoints", filename="{step}", every_n_train_steps=2, save_top_k=-1
        )
        strategy = lightning.pytorch.strategies.ModelParallelStrategy(1, 1, process_group_backend="gloo")
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", strategy=strategy, callbacks=[kept], logger=False, devices=1
        )
        exec(recipe("Lightning"), {"trainer": trainer, "model": Module()})
        expected = {2: [0, 1], 4: [2, 3], 5: [2, 3, 4]}[steps]
        assert began == expected
        for path in (tmp_path / "checkpoints").glob("*step=4*/*.distcp"):
            path.write_bytes(b"")  # so that the last one resumes from the one before
    torch.distributed.destroy_process_group()
