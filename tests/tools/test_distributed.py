"""Several ranks of one command, by torchrun or --distributed: the results of one process, and all fail if one does."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ckpt_patches.errors import UserError
from ckpt_patches.runtime.distributed import Ranks, place
from test_audit_many import arrays
from test_audit_many import written as by_hand
from test_audit_repair import contents
from test_interrupted import write_old
from trainers.ranks import free_port
from universal import environment, parallel

LIMIT = 900  # seconds
POD = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}
SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}
SMALL = "migrated.FILE = repair_plan.AT_A_TIME = scan.SPAN = scan.BLOCK = 1000"  # so that there are many pieces
# Timeouts for a loaded machine. Only a wait for a lost rank takes this long.
SHORT = "distributed.STEP, distributed.START = timedelta(seconds=30), timedelta(minutes=2)"


# Ranks


@pytest.mark.parametrize(
    ("variables", "wanted", "expected"),
    [
        ({}, None, (0, 1)),
        (POD, None, (0, 1)),
        (SRUN, None, (0, 1)),
        ({**POD, **TORCHRUN}, None, (3, 8)),
        ({**POD, **TORCHRUN}, False, (0, 1)),
        (POD, True, (3, 8)),
        ({**POD, "RANK": "0", "WORLD_SIZE": "1"}, True, (0, 1)),
    ],
)
def test_the_place_of_a_process(variables: dict[str, str], wanted: bool | None, expected: tuple[int, int]) -> None:
    assert place(wanted, variables) == expected


@pytest.mark.parametrize("wrong", [{}, {"RANK": "x"}, {"RANK": "8"}, {"RANK": "-1"}, {"MASTER_PORT": ""}])
def test_variables_that_are_missing_or_wrong(wrong: dict[str, str]) -> None:
    with pytest.raises(UserError, match="expected RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment"):
        place(True, {**POD, **wrong} if wrong else SRUN)


def test_ranks_of_a_host_share_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    for size, of_host, expected in ((1, "2", 8), (4, "2", 4), (4, "", 8), (32, "16", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", of_host)
        assert Ranks(0, size).workers == expected


# Commands


@dataclass(frozen=True)
class Work:
    """A command of the tools, and the folder that it writes."""

    command: str
    options: tuple[str | Path, ...]
    output: Path

    def program(self, change: str = "", at_end: str = "") -> str:
        return f"""
import os, sys, time
from datetime import timedelta
from ckpt_patches import cli
from ckpt_patches.audit import audit, run_folder
from ckpt_patches.audit.judging import scan
from ckpt_patches.audit.repair import plan as repair_plan
from ckpt_patches.formats import ranged
from ckpt_patches.migrate import output as migrated
from ckpt_patches.runtime import distributed, unfinished
from ckpt_patches.convert import convert_command as command, write as writing
{SMALL}
{change}
status = {"command" if self.command == "convert" else "cli"}.main(sys.argv[1:])
{at_end}
sys.exit(status)
"""

    @property
    def arguments(self) -> list[str]:
        return [*([] if self.command == "convert" else [self.command]), *map(str, self.options)]

    def alone(self, at_end: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-c", self.program(at_end=at_end), *self.arguments]
        env = environment(**variables)
        return subprocess.run(program, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)

    def torchrun(self, size: int, folder: Path) -> subprocess.CompletedProcess[str]:
        script = folder / "program.py"
        script.write_text(self.program())
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(size), "--master-port", str(free_port())]
        program = [sys.executable, *launcher, str(script), *self.arguments]
        return subprocess.run(program, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False)

    def by_hand(self, *changes: str, largest_file: int = -1, lost: int = -1) -> list[tuple[int, str, str]]:
        """Run a rank per change, with --distributed; limit the last one's file sizes. Returns status, output, errors.

        `lost` is a rank that does not end by itself. It is killed after all others.
        """
        shared = {"WORLD_SIZE": str(len(changes)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        running = []
        for rank, change in enumerate(changes):
            is_limited = largest_file >= 0 and rank == len(changes) - 1
            running.append(
                subprocess.Popen(
                    [sys.executable, "-c", self.program(change), *self.arguments, "--distributed"],
                    env=environment(**shared, RANK=str(rank)),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    preexec_fn=partial(limit_files, largest_file) if is_limited else None,
                )
            )
        try:
            said = {rank: own.communicate(timeout=LIMIT) for rank, own in enumerate(running) if rank != lost}
        finally:
            for process in running:
                process.kill()
        if lost >= 0:
            said[lost] = running[lost].communicate(timeout=LIMIT)
        return [(process.returncode, *said[rank]) for rank, process in enumerate(running)]


def limit_files(nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def work(command: str, tmp_path: Path, to: str) -> Work:
    output = tmp_path / to / command
    output.parent.mkdir(exist_ok=True)
    if command == "convert":
        folders = ("--input-folder", parallel("megatron")["megatron"], "--output-folder", output)
        return Work(command, (*folders, "--workers", "1", "--json"), output)
    source = tmp_path / ("old" if command == "migrate" else "damaged")
    if not source.exists():
        write_old(source) if command == "migrate" else write_damaged(source)
    out = () if command in READING else ("--output", output)
    return Work(command, (source, *out, "--json", "--workers", "1"), output)


def write_damaged(path: Path) -> None:
    states = arrays(400, 64)
    states["fp32_param"].reshape(-1)[5::7000] = np.nan
    by_hand(path, states, arrays(400, 64)["fp32_param"])


BESIDE = {"convert": ["convert", "latest_universal"], "migrate": ["migrate"], "audit": [], "fingerprint": []}
READING = ("audit", "fingerprint")  # these write nothing
COMMANDS = [name if name == "audit" else pytest.param(name, marks=pytest.mark.slow) for name in BESIDE]


def check_same(own: Work, single: Work) -> None:
    """Check that the outputs are equal, with nothing beside them."""
    if own.command not in READING:
        assert contents(own.output) == contents(single.output)
    assert sorted(path.name for path in own.output.parent.iterdir() if path.suffix != ".py") == BESIDE[own.command]


@pytest.mark.parametrize("command", COMMANDS)
def test_ranks_of_torchrun_do_what_one_process_does(command: str, tmp_path: Path) -> None:
    single, own = work(command, tmp_path, "alone"), work(command, tmp_path, "together")
    status = 1 if command == "audit" else 0  # the checkpoint is damaged
    alone, together = single.alone(), own.torchrun(3, own.output.parent)
    assert (alone.returncode, together.returncode) == (status, status), (alone.stderr, together.stderr)
    check_same(own, single)
    if command in READING:
        assert together.stdout == alone.stdout.replace(str(single.output), str(own.output))
    else:
        found, expected = json.loads(together.stdout), json.loads(alone.stdout)
        assert {key: found[key] for key in ("bytes", "files")} == {key: expected[key] for key in ("bytes", "files")}


@pytest.mark.parametrize("command", BESIDE)
def test_one_process_needs_no_torch_and_waits_for_nobody(command: str, tmp_path: Path) -> None:
    """One process imports no torch, and in a pod does not wait for the ranks in its variables."""
    done = work(command, tmp_path, "alone").alone("status = 9 if 'torch' in sys.modules else status", **POD)
    assert done.returncode == (1 if command == "audit" else 0), done.stderr


# A rank that fails


def test_where_nothing_is_to_do_all_ranks_end_well(tmp_path: Path) -> None:
    new = work("migrate", tmp_path, "alone")
    assert new.alone().returncode == 0
    options = (new.output, "--output", tmp_path / "again", "--json", "--workers", "1")
    first, other = Work("migrate", options, tmp_path / "again").by_hand("", "")
    assert (first[0], other) == (0, (0, "", "")), (first, other)
    assert "needs nothing" in json.loads(first[1])["nothing_to_do"]


@pytest.mark.slow
def test_all_ranks_end_with_the_status_of_rank_0(tmp_path: Path) -> None:
    damaged = "from ckpt_patches.migrate import migrate\ndef prepare(*given): raise migrate.DamagedError('damaged')\n"
    found = work("migrate", tmp_path, "together").by_hand(f"{damaged}migrate.prepare = prepare", "")
    assert [status for status, _, _ in found] == [1, 1], found
    assert found[1][2].count("rank 0 has the reason") == 1


def once(message: str, found: Sequence[tuple[int, str, str]]) -> None:
    """Check that all failed, and one printed the message."""
    assert all(status not in (0, 1) for status, _, _ in found), found
    assert sum(errors.count(message) for _, _, errors in found) == 1, found


@pytest.mark.slow
@pytest.mark.parametrize("command", ["convert"])
def test_a_full_disk_of_one_rank_ends_all_and_the_same_command_goes_on(command: str, tmp_path: Path) -> None:
    single, own = work(command, tmp_path, "alone"), work(command, tmp_path, "together")
    alone = single.alone()
    assert alone.returncode == 0, alone.stderr
    found = own.by_hand("", "", largest_file=300)
    once("File too large", found)
    assert "rank 1 of 2: " in found[0][2]
    assert not own.output.exists()
    assert not (own.output.parent / "latest_universal").exists()

    again = own.by_hand("", "")
    assert [status for status, _, _ in again] == [0, 0], again
    check_same(own, single)
    if command == "convert":
        (summary,) = [json.loads(out) for _, out, _ in again if out]
        assert summary["files_before"] > 0
        assert summary["files"] + summary["files_before"] == json.loads(alone.stdout)["files"]


AFTER_ONE_FILE = """
call, main = writing.Writer.__call__, os.getpid()
def last(self, batch):
    done = call(self, batch[:1])
    os.kill(main, {signal})
    return done
writing.Writer.__call__ = last
"""


@pytest.mark.parametrize(
    ("signal", "lost"),
    [(9, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((9, 0), (19, 1), (19, 0)))],
)
def test_a_lost_rank_is_named_and_the_same_command_goes_on(signal: int, lost: int, tmp_path: Path) -> None:
    single, own = work("convert", tmp_path, "alone"), work("convert", tmp_path, "together")
    changes = [SHORT, SHORT]
    changes[lost] += AFTER_ONE_FILE.format(signal=signal)
    found = own.by_hand(*changes, lost=lost)
    assert found[lost][0] == -9
    status, out, errors = found[1 - lost]
    assert (status, out) == (2, "")
    named = "rank 1 of 2" if lost else "one of the 2 ranks"
    if signal == 9:  # Gloo names no rank whose connection was closed before the barrier
        named = f"({named}|one of the 2 ranks)"
    assert re.search(f"ds_to_universal: {named} is missing at the end of writing", errors)
    assert not own.output.exists()
    assert single.alone().returncode == 0
    assert [status for status, _, _ in own.by_hand("", "")] == [0, 0]
    check_same(own, single)


@pytest.mark.slow
def test_a_rank_that_never_starts(tmp_path: Path) -> None:
    own = work("audit", tmp_path, "together")
    (status, out, errors), _ = own.by_hand("distributed.START = timedelta(seconds=4)", "sys.exit()")
    assert (status, out) == (2, "")
    assert "rank 0 of 2 cannot join the others at 127.0.0.1:" in errors


UNREADABLE = """
def fail(self, path, offset, into): raise OSError(5, "a broken disk", "a disk")
ranged.RangedFiles.read = fail
"""


def test_a_share_that_cannot_be_read_is_a_finding(tmp_path: Path) -> None:
    first, other = work("audit", tmp_path, "together").by_hand("", UNREADABLE)
    assert (first[0], other[:2]) == (3, (3, "")), (first, other)
    (checkpoint,) = json.loads(first[1])["checkpoints"]
    (unreadable,) = [own["detail"] for own in checkpoint["findings"] if own["name"] == "unreadable"]
    assert unreadable.startswith("a broken disk")


@pytest.mark.slow
def test_a_defect_of_one_rank_is_reported_by_rank_0(tmp_path: Path) -> None:
    found = work("audit", tmp_path, "together").by_hand("", "audit._share = lambda *given: 1 / 0")
    once("ZeroDivisionError", found)
    assert "a defect, please report it" in found[0][2]


@pytest.mark.slow
@pytest.mark.parametrize("argument", [2, 4])
def test_a_rank_with_another_input_or_output_ends_all(argument: int, tmp_path: Path) -> None:
    own = work("convert", tmp_path, "together")
    other = tmp_path / "other"
    if argument == 2:
        shutil.copytree(own.options[1], other)
    message = "expected the folder that rank 0 has made for the same checkpoint, found another one or none"
    once(message, own.by_hand("", f"sys.argv[{argument}] = {str(other)!r}"))
    assert not own.output.exists()


@pytest.mark.slow
def test_a_rank_with_other_files_to_compare_ends_all(tmp_path: Path) -> None:
    own, other = work("fingerprint", tmp_path, "together"), tmp_path / "other"
    shutil.copytree(own.options[0], other)
    next(other.glob("*/.zarray")).parent.rename(other / "another")
    once("expected the same files on all ranks", own.by_hand("", f"sys.argv[2] = {str(other)!r}"))
