"""Several processes convert together, started by torchrun or srun: each its share by bytes, one barrier at the end."""

import json
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckpt_patches.errors import UserError
from deepspeed_patches.ds_to_universal.group import Group
from universal import MODULE, command, distinct, environment, files, ours, parallel
from upstream import free_port

SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.fixture(scope="module")
def source() -> Path:
    return parallel("megatron")["megatron"]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Group()),
        ({"RANK": "3", "WORLD_SIZE": "8", **SRUN}, Group(3, 8)),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "1"}, Group(1, 4)),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "2", "MASTER_ADDR": "node0"}, Group(1, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "64"}, Group()),  # a batch script, alone
    ],
)
def test_the_place_of_a_process(variables: dict[str, str], expected: Group) -> None:
    assert Group.of(variables) == expected


def test_tasks_on_several_machines_have_to_know_where_they_meet() -> None:
    with pytest.raises(UserError, match="MASTER_ADDR"):
        Group.of({**SRUN, "SLURM_STEP_NUM_NODES": "2"})


def test_under_torchrun(source: Path, tmp_path: Path) -> None:
    ours(source, tmp_path / "alone")
    output = tmp_path / "together" / "universal"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "3"]
    torchrun += ["--master_port", str(free_port()), "-m", MODULE]
    arguments = torchrun + command(source, output, "--json")[3:]
    done = subprocess.run(arguments, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert files(output) == files(tmp_path / "alone")
    assert (output.parent / "latest_universal").read_text() == "universal"
    summaries = [json.loads(line) for line in done.stdout.splitlines()]
    assert sum(found["files"] for found in summaries) == distinct(output)
    assert sum(found["links"] for found in summaries) == len(files(output)) - distinct(output)
    assert len(summaries) == 3
    assert min(found["files"] for found in summaries) > 0


def test_under_srun_and_one_that_fails(source: Path, tmp_path: Path) -> None:
    """A task whose disk is full fails, and so does the other: nothing looks complete. The next run goes on."""
    output = tmp_path / "universal"
    failed = tasks(source, output, largest_file_of_last=100)
    assert [code for code, _, _ in failed] == [2, 2]
    assert "another process of this conversion has failed" in failed[0][2]
    assert "cannot be written: File too large" in failed[1][2]
    assert not output.exists()
    assert not (tmp_path / "latest_universal").exists()

    found = tasks(source, output)
    assert [code for code, _, _ in found] == [0, 0], found
    ours(source, tmp_path / "alone")
    assert files(output) == files(tmp_path / "alone")


def tasks(source: Path, output: Path, largest_file_of_last: int = -1) -> list[tuple[int, str, str]]:
    """Two, as srun starts them on one machine: status, output and errors of each."""
    limit = (largest_file_of_last, resource.RLIM_INFINITY)
    shared = {"SLURM_STEP_NUM_TASKS": "2", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    running: list[Any] = [
        subprocess.Popen(
            command(source, output),
            env=environment(**shared, SLURM_PROCID=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, limit) if rank else None,
        )
        for rank in range(2)
    ]
    ended = [(process.communicate(timeout=300), process.returncode) for process in running]
    return [(code, out, err) for (out, err), code in ended]
