"""Several processes convert together, started by a launcher: each its share by bytes, and all end alike."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckpt_patches.demo.ranks import free_port
from ckpt_patches.errors import UserError
from ckpt_patches.formats.unfinished import meeting_folder
from ckpt_patches.group import Group
from universal import MODULE, command, distinct, environment, files, ours, parallel

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0"}
POD = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}


@pytest.fixture(scope="module")
def source() -> Path:
    return parallel("megatron")["megatron"]


@pytest.mark.parametrize(
    ("variables", "chosen", "rank", "size", "note"),
    [
        ({}, "", 0, 1, ""),
        ({**POD, **TORCHRUN, **SRUN}, "", 3, 8, "process 3 of 8, counted from 0, by torchrun's RANK and WORLD_SIZE"),
        (SRUN, "", 1, 4, "process 1 of 4, counted from 0, by srun's SLURM_PROCID and SLURM_STEP_NUM_TASKS"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "64"}, "", 0, 1, ""),  # a batch script, alone
        (MPIRUN, "", 2, 3, "process 2 of 3, counted from 0, by mpirun's OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE"),
        ({**POD, **TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}, "", 0, 1, ""),
        (
            POD,
            "",
            0,
            1,
            "RANK=3 and WORLD_SIZE=8 are set, but not by torchrun, srun or mpirun: this process does all of "
            "the work; --group 3/8 makes it one of 8 that do it together",
        ),
        (POD, "none", 0, 1, ""),
        ({**POD, **TORCHRUN}, "none", 0, 1, ""),
        (POD, "5/6", 5, 6, "process 5 of 6, counted from 0, by --group 5/6"),
    ],
)
def test_the_place_of_a_process(variables: dict[str, str], chosen: str, rank: int, size: int, note: str) -> None:
    assert Group.of(variables, chosen) == Group(rank, size, note)


@pytest.mark.parametrize("chosen", ["3", "3/", "8/8", "-1/8", "all", "1/2/3"])
def test_a_place_that_is_none(chosen: str) -> None:
    with pytest.raises(UserError, match=f"expected a process's number and how many there are.*: --group {chosen}$"):
        Group.of({}, chosen)


def test_a_launchers_variable_that_is_no_number() -> None:
    with pytest.raises(UserError, match="found x/8: torchrun's RANK and WORLD_SIZE"):
        Group.of({**POD, **TORCHRUN, "RANK": "x"})


@pytest.mark.slow
def test_under_torchrun(source: Path, tmp_path: Path) -> None:
    ours(source, tmp_path / "alone")
    output = tmp_path / "together" / "universal"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "3"]
    torchrun += ["--master_port", str(free_port()), "-m", MODULE]
    arguments = torchrun + command(source, output, "--json")[3:]
    done = subprocess.run(arguments, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert files(output) == files(tmp_path / "alone")
    assert sorted(os.listdir(output.parent)) == ["latest_universal", "universal"]
    assert "process 2 of 3, counted from 0, by torchrun's RANK and WORLD_SIZE" in done.stderr
    summaries = [json.loads(line) for line in done.stdout.splitlines()]
    assert sum(found["files"] for found in summaries) == distinct(output)
    assert sum(found["links"] for found in summaries) == len(files(output)) - distinct(output)
    assert len(summaries) == 3
    assert min(found["files"] for found in summaries) > 0


def test_by_hand_in_a_pod_all_is_converted(source: Path, tmp_path: Path) -> None:
    done = ours(source, tmp_path / "universal", env=POD)
    assert done.stderr.startswith("ds_to_universal: RANK=3 and WORLD_SIZE=8 are set, but not by torchrun")
    assert len(done.stderr.splitlines()) == 1
    ours(source, tmp_path / "alone")
    assert files(tmp_path / "universal") == files(tmp_path / "alone")


@pytest.mark.parametrize(
    "launched",
    [
        lambda rank: {"RANK": rank, "WORLD_SIZE": "2", **TORCHRUN},
        lambda rank: {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0"},
    ],
    ids=["torchrun", "srun"],
)
def test_a_group_needs_no_torch(source: Path, tmp_path: Path, launched: Any) -> None:
    program = "sys.exit(status or 3 * ('torch' in sys.modules))"
    running = [start(source, tmp_path / "universal", at_end=program, env=launched(str(rank))) for rank in range(2)]
    assert [ended(process)[0] for process in running] == [0, 0]
    ours(source, tmp_path / "alone")
    assert files(tmp_path / "universal") == files(tmp_path / "alone")


# One that fails

SLOW = "import time; workers.Writer.write = lambda *_: time.sleep(60)"
FAILS = "def fail(*_): raise UserError('the disk of this one is broken')\nconvert.prepare = fail"
NEVER_CAME = "there was never a sign of it, for 2 s (one that works alone takes --group none)"
ELSEWHERE = "meeting.place = lambda: ''"
IMPATIENT = "meeting.BEAT, meeting.SILENT, meeting.ABSENT = 0.2, 2, 2"


def start(
    source: Path,
    output: Path,
    *options: str,
    change: str = "",
    at_end: str = "sys.exit(status)",
    env: dict[str, str] | None = None,
    largest_file: int = -1,
) -> subprocess.Popen[str]:
    """The command, with something in it changed."""
    program = f"""
import sys
from ckpt_patches.errors import UserError
from ckpt_patches import meeting
from deepspeed_patches.ds_to_universal import command, convert as _, workers
convert = sys.modules["deepspeed_patches.ds_to_universal.convert"]
{change}
status = command.main()
{at_end}
"""
    python, _, _, *folders = command(source, output)
    limit = (largest_file, resource.RLIM_INFINITY)
    return subprocess.Popen(
        [python, "-c", program, *folders, *options],
        env=environment(**(env or {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, limit) if largest_file >= 0 else None,
    )


def ended(process: subprocess.Popen[str], timeout: float = 60) -> tuple[int, str]:
    """Its status and its errors, but for what it says at the start."""
    _, errors = process.communicate(timeout=timeout)
    return process.returncode, "".join(line for line in errors.splitlines(True) if ", counted from 0, by " not in line)


def told(rank: int, size: int, message: str) -> tuple[int, str]:
    return 2, f"ds_to_universal: process {rank} of {size}, counted from 0, has failed: {message}\n"


def pair(source: Path, output: Path, changes: Sequence[str]) -> list[subprocess.Popen[str]]:
    places = [f"{rank}/{len(changes)}" for rank in range(len(changes))]
    return [
        start(source, output, "--group", place, change=change) for place, change in zip(places, changes, strict=True)
    ]


@pytest.mark.parametrize("failing", [0, 1])
def test_one_that_fails_before_it_has_begun_stops_the_others_within_seconds(
    failing: int, source: Path, tmp_path: Path
) -> None:
    begin = time.monotonic()
    running = pair(source, tmp_path / "universal", [FAILS if rank == failing else SLOW for rank in range(3)])
    expected = [told(failing, 3, "the disk of this one is broken")] * 3
    expected[failing] = (2, "ds_to_universal: the disk of this one is broken\n")
    assert [ended(process, 30) for process in running] == expected
    assert time.monotonic() - begin < 20
    assert not (tmp_path / "universal").exists()
    assert not meeting_folder(tmp_path / "universal").exists()


def test_one_that_begins_later_hears_of_it_too(source: Path, tmp_path: Path) -> None:
    first = start(source, tmp_path / "universal", "--group", "1/2", change=FAILS)
    time.sleep(3)
    second = start(source, tmp_path / "universal", "--group", "0/2", change=SLOW)
    assert ended(second, 20) == told(1, 2, "the disk of this one is broken")
    assert ended(first, 20)[0] == 2


def test_a_defect_of_one_stops_the_others(source: Path, tmp_path: Path) -> None:
    defect = "def fail(*_): raise KeyError('group')\nconvert.prepare = fail"
    failed, other = pair(source, tmp_path / "universal", [defect, SLOW])
    assert ended(other, 30) == told(0, 2, "KeyError 'group'")
    status, errors = ended(failed, 30)
    assert (status, errors.splitlines()[0]) == (1, "Traceback (most recent call last):")


@pytest.mark.parametrize("interrupted", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_that_is_interrupted_stops_the_others(interrupted: int, source: Path, tmp_path: Path) -> None:
    running = pair(source, tmp_path / "universal", [SLOW, SLOW])
    wait_until_they_have_met(tmp_path / "universal", 2)
    running[interrupted].send_signal(signal.SIGINT)
    assert ended(running[1 - interrupted], 30) == told(interrupted, 2, "it was interrupted")
    assert ended(running[interrupted], 30)[0] == 130


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_that_is_killed_on_the_same_machine_is_missed_at_once(killed: int, source: Path, tmp_path: Path) -> None:
    running = pair(source, tmp_path / "universal", [SLOW] * 2)
    wait_until_they_have_met(tmp_path / "universal", 2)
    running[killed].kill()
    begin = time.monotonic()
    assert ended(running[1 - killed], 60) == told(killed, 2, "it has ended without a word, as one that is killed")
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_that_is_killed_is_missed(killed: int, source: Path, tmp_path: Path) -> None:
    """On another machine, after 2 s without a sign of it."""
    running = pair(source, tmp_path / "universal", [f"{IMPATIENT}\n{SLOW}\n{ELSEWHERE}"] * 2)
    wait_until_they_have_met(tmp_path / "universal", 2)
    running[killed].kill()
    assert ended(running[1 - killed], 30) == told(killed, 2, "there was no sign of it for 2 s")


def wait_until_they_have_met(output: Path, size: int) -> None:
    """Each has heard of the first, and the first of all."""
    names = [meeting_folder(output) / str(rank) for rank in range(size)]
    heard: set[str] = set()
    while len(heard) < size:
        time.sleep(0.05)
        if all(name.exists() for name in names):
            heard = {token for name in names for token in json.loads(name.read_bytes())["heard"].values()}
    time.sleep(1)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_that_never_comes_is_not_waited_for_for_ever(rank: int, source: Path, tmp_path: Path) -> None:
    alone = start(source, tmp_path / "universal", "--group", f"{rank}/2", change=f"{IMPATIENT}; meeting.HEARD = 1")
    assert ended(alone, 30) == told(1 - rank, 2, NEVER_CAME)


@pytest.mark.slow
def test_what_an_earlier_conversion_has_left_is_not_believed(source: Path, tmp_path: Path) -> None:
    """Of any state, of the first process and of others; and what is no marker at all."""
    folder = meeting_folder(tmp_path / "universal")
    folder.mkdir()
    for first, second in (("failed", "failed"), ("finished", "done"), ("running", "running")):
        for rank, state in enumerate((first, second)):
            heard = {"0": "an older one", "1": "an older one"}
            old = {
                "token": "old",
                "heard": heard,
                "state": state,
                "failed": rank,
                "message": "no",
                "gone": state == "done",
                "beat": 5,
            }
            (folder / str(rank)).write_text(json.dumps(old))
        (folder / "2").write_text("{")
        running = pair(source, tmp_path / "universal", ["", "", ""])
        assert [ended(process) for process in running] == [(0, "")] * 3
        ours(source, tmp_path / "alone")
        assert files(tmp_path / "universal") == files(tmp_path / "alone")
        assert not folder.exists()
        for name in ("universal", "alone"):
            (tmp_path / name).rename(tmp_path / f"{name}-{first}")
        folder.mkdir()


def test_one_whose_disk_is_full_and_the_next_run_goes_on(source: Path, tmp_path: Path) -> None:
    """It fails, and so do the others: nothing looks complete."""
    output = tmp_path / "universal"
    ours(source, tmp_path / "other" / "alone")
    largest = max(map(len, files(tmp_path / "other" / "alone").values()))
    full = [start(source, output, "--group", f"{rank}/2", largest_file=largest - 1) for rank in range(2)]
    failed = [ended(process) for process in full]
    assert [status for status, _ in failed] == [2, 2]
    assert all("cannot be written: File too large" in errors for _, errors in failed)
    assert not output.exists()
    assert not (tmp_path / "latest_universal").exists()
    assert not meeting_folder(output).exists()

    assert [ended(process) for process in pair(source, output, ["", ""])] == [(0, ""), (0, "")]
    assert files(output) == files(tmp_path / "other" / "alone")
