"""On several hosts that share a folder: all is done that is done on one, and a host that stops is named."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ckpt_patches.audit.audit import WHOLE, audit
from hosts import LIMIT, PORT, Host, MakeHosts, finished, torchrun, until
from test_audit_many import arrays
from test_audit_many import written as by_hand
from test_audit_repair import contents
from test_ds_to_universal_group import TORCHRUN
from test_migrate_interrupted import write as write_old
from universal import MODULE, environment, parallel
from upstream import PROGRAMS, all_releases, environment_for, tree

pytestmark = pytest.mark.slow


# The tools


@dataclass(frozen=True)
class Work:
    """A command of the tools."""

    command: str
    options: tuple[str | Path, ...]
    output: Path

    @property
    def arguments(self) -> list[str]:
        return [*([] if self.command == "convert" else [self.command]), *map(str, self.options)]

    def program(self, change: str) -> str:
        """With something in it changed."""
        return f"""
import sys, time
from ckpt_patches import cli, meeting
from ckpt_patches.audit import audit, copies, scan
from ckpt_patches.formats import ranged
from ckpt_patches.migrate import migrate, move
from ckpt_patches.migrate import migration_plan as plan
from deepspeed_patches.ds_to_universal import command, convert, workers
{change}
sys.exit({"command" if self.command == "convert" else "cli"}.main(sys.argv[1:]))
"""

    def start(self, host: Host, rank: int, size: int, change: str = "") -> subprocess.Popen[str]:
        """As torchrun starts it."""
        launched = {**TORCHRUN, "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": PORT}
        return host.start(sys.executable, "-c", self.program(change), *self.arguments, env=environment(**launched))

    def start_all(self, on: Sequence[Host], change: str = "") -> list[subprocess.Popen[str]]:
        return [self.start(host, rank, len(on), change) for rank, host in enumerate(on)]

    def result(self, ended: Sequence[tuple[int, str, str]]) -> object:
        """What it comes to, whoever has done it."""
        return "".join(out for _, out, _ in ended) if self.command == "audit" else contents(self.output)

    def meeting_files(self) -> list[Path]:
        """Those by which processes say that they are there."""
        beside = [self.output.parent, *(Path(option).parent for option in self.options)]
        return [file for folder in beside for pattern in MEET for file in folder.glob(f"{pattern}/[0-9]")]

    def is_in_the_middle(self) -> bool:
        """There is some of what it writes, under another name; an audit writes nothing."""
        name = self.output.name
        begun = [*self.output.parent.glob(f"{name}.unfinished"), *self.output.parent.glob(f".{name}.*")]
        files = (file for folder in begun for file in folder.rglob("*") if file.is_file())
        return self.command == "audit" or any(not file.name.startswith(".ckpt-patches") for file in files)


MEET = ("*.group", ".ckpt-patches-group-*")
PACED = """
import functools
def paced(own):
    @functools.wraps(own)
    def slow(*given):
        result = own(*given)
        time.sleep(SECONDS)
        return result
    return slow
"""
SLOW = {
    "convert": "workers.Writer.write = paced(workers.Writer.write)",
    "migrate": "move.write = paced(move.write)",
    "audit": "ranged.RangedFiles.read = paced(ranged.RangedFiles.read)",
    "repair": "copies._copy = paced(copies._copy)",
}
SMALL = "plan.FILE = copies.AT_A_TIME = scan.SPAN = scan.BLOCK = 1000"  # so that there are many pieces
IMPATIENT = "meeting.BEAT, meeting.SILENT, meeting.ABSENT = 0.2, 4, 30"


def slowly(command: str, pace: float = 1) -> str:
    seconds = pace * (3 if command in ("convert", "migrate") else 0.5)  # files are few
    return f"{SMALL}\nSECONDS = {seconds}\n{PACED}\n{SLOW[command]}\n{IMPATIENT}"


def work(command: str, tmp_path: Path, to: str) -> Work:
    """What it works on is made at the first call."""
    output = tmp_path / to / command
    output.parent.mkdir(exist_ok=True)
    if command == "convert":
        folders = ("--input_folder", parallel("megatron")["megatron"], "--output_folder", output)
        return Work(command, (*folders, "--num_extract_workers", "1"), output)
    source = tmp_path / ("old" if command == "migrate" else "damaged")
    if not source.exists():
        write_old(source) if command == "migrate" else write_damaged(source)
    options = ("--json",) if command == "audit" else ("--output", output)
    return Work(command, (source, *options, "--workers", "1"), output)


def write_damaged(path: Path) -> None:
    states = arrays(400, 64)
    states["fp32_param"].reshape(-1)[5::7000] = np.nan
    by_hand(path, states, arrays(400, 64)["fp32_param"])


def until_in_the_middle(own: Work, running: Sequence[subprocess.Popen[str]]) -> None:
    def have_met() -> bool:
        assert [process.poll() for process in running] == [None] * len(running), finished(running)
        said = [json.loads(file.read_bytes()) for file in own.meeting_files()]
        return len({token for one in said for token in one["heard"].values()}) == len(running)

    until(have_met)
    until(own.is_in_the_middle)
    time.sleep(0.5)


# What is left beside the output in the end.
BESIDE = {"convert": ["convert", "latest_universal"], "migrate": ["migrate"], "audit": [], "repair": ["repair"]}


def start_alone(command: str, tmp_path: Path, host: Host, change: str = "") -> tuple[Work, subprocess.Popen[str]]:
    own = work(command, tmp_path, "alone")
    return own, own.start(host, 0, 1, change)


# One that hangs is let go on in the end: that takes turns of the processes which a busy machine may not give in time.
LOST = [("migrate", "kill", 1), ("repair", "kill", 1), ("convert", "kill", 0), ("audit", "kill", 0)]
MORE_LOST = [("convert", "stop", 1), ("audit", "stop", 1), ("migrate", "kill", 0), ("repair", "kill", 0)]


@pytest.mark.parametrize(("command", "happens", "number"), [*LOST, *(MORE_LOST if all_releases() else [])])
def test_a_host_that_ends_or_hangs_is_named_and_the_same_command_finishes_the_work(
    command: str, happens: str, number: int, make_hosts: MakeHosts, tmp_path: Path
) -> None:
    """And one that goes on again after that changes nothing any more."""
    made = make_hosts(3)
    others = [host for host in made if host is not made[number]]
    lost, first = made[number], others[0]
    by_one, single = start_alone(command, tmp_path, first, SMALL)
    own = work(command, tmp_path, "together")
    running = own.start_all(made, slowly(command))
    until_in_the_middle(own, running)
    begin = time.monotonic()
    lost.kill() if happens == "kill" else lost.stop()
    ended = finished([process for process in running if process is not running[number]])
    assert time.monotonic() - begin < LIMIT / 2
    message = f"process {number} of 3, counted from 0, on host{number}, has failed: there was no sign of it for 4 s\n"
    assert [status for status, _, _ in ended] == [2, 2]
    # In these the first one says it for all, if it is there.
    telling = ended[:1] if command in ("audit", "repair") and number != 0 else ended
    assert [errors[-len(message) :] for _, _, errors in telling] == [message] * len(telling)
    assert not own.output.exists()

    again = own.start_all(others, SMALL)
    found = own.result(finished(again))
    assert found == by_one.result(finished([single]))
    left = sorted(path.name for path in own.output.parent.iterdir())
    if command == "repair" and number == 0:  # its copy, which it would have removed
        assert left.pop(0).startswith(".repair.")
    assert left == BESIDE[command]
    if happens == "stop":
        lost.go_on()
        assert finished([running[number]])[0][0] == 2
        assert command == "audit" or contents(own.output) == found


def test_one_that_is_killed_is_known_at_once_on_its_host_and_named_with_it_on_others(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    one, other = make_hosts(2)
    own = work("convert", tmp_path, "together")
    patient = slowly("convert").replace(", 4, 30", ", 60, 60")
    running = own.start_all([one, one, other], patient)
    until_in_the_middle(own, running)
    own_of_host = Path(f"/proc/{running[1].pid}/task/{running[1].pid}/children").read_text().split()
    os.kill(int(own_of_host[0]), signal.SIGKILL)
    begin = time.monotonic()
    here, _, there = finished(running)
    assert time.monotonic() - begin < 30  # nobody has waited until it had been silent
    ended = "has failed: it has ended without a word, as one that is killed\n"
    assert here[2].endswith(f"process 1 of 3, counted from 0, {ended}")
    assert there[2].endswith(f"process 1 of 3, counted from 0, on host0, {ended}")


CUT = [("convert", 1)]
MORE_CUT = [("convert", 0), ("audit", 0), ("migrate", 1), ("repair", 1)]


@pytest.mark.parametrize(("command", "number"), [*CUT, *(MORE_CUT if all_releases() else [])])
def test_a_cut_network_does_not_stop_the_work(command: str, number: int, make_hosts: MakeHosts, tmp_path: Path) -> None:
    """The processes meet in the folder that they share; their network goes on, where it is that of the machines."""
    made = make_hosts(2)
    by_one, single = start_alone(command, tmp_path, made[0], SMALL)
    own = work(command, tmp_path, "together")
    running = own.start_all(made, slowly(command, 1 / 6))
    until_in_the_middle(own, running)
    made[number].cut_network()
    ended = finished(running)
    assert [status for status, _, _ in ended] == [1 if command == "audit" else 0] * 2, ended
    assert own.result(ended) == by_one.result(finished([single]))


# Under torchrun


@pytest.mark.parametrize("size", [2, 3])
def test_all_tools_under_torchrun(size: int, make_hosts: MakeHosts, tmp_path: Path) -> None:
    """One after the other, in one run of it."""
    made = make_hosts(size)
    by_one = [start_alone(command, tmp_path, made[0]) for command in SLOW]
    works = [work(command, tmp_path, "together") for command in SLOW]
    module = {"convert": MODULE}
    lines = [
        f"{shlex.join([sys.executable, '-m', module.get(own.command, 'ckpt_patches'), *own.arguments])} "
        f"> {tmp_path}/$RANK-{own.command}; echo $? >> {tmp_path}/$RANK-status"
        for own in works
    ]
    ended = finished(torchrun(made, "bash", "-c", "\n".join(lines), env=environment()))
    assert [status for status, _, _ in ended] == [0] * size, ended
    for rank in range(size):
        assert (tmp_path / f"{rank}-status").read_text().split() == ["0", "0", "1", "0"], ended
    for own, (single, process) in zip(works, by_one, strict=True):
        out = "".join((tmp_path / f"{rank}-{own.command}").read_text() for rank in range(size))
        assert own.result([(0, out, "")]) == single.result(finished([process]))
        assert not own.meeting_files()


@pytest.mark.parametrize("command", ["convert", *(["audit", "migrate", "repair"] if all_releases() else [])])
def test_a_host_that_is_killed_with_its_torchrun_is_named_by_the_others(
    command: str, make_hosts: MakeHosts, tmp_path: Path
) -> None:
    """Their own torchrun ends when they do; it does not notice by itself."""
    made = make_hosts(3)
    first, lost, other = made
    by_one, single = start_alone(command, tmp_path, first, SMALL)
    own = work(command, tmp_path, "together")
    running = torchrun(made, sys.executable, "-c", own.program(slowly(command)), *own.arguments, env=environment())
    until_in_the_middle(own, running)
    begin = time.monotonic()
    lost.kill()
    ended = finished([running[0], running[2]])
    assert time.monotonic() - begin < 60
    assert [status for status, _, _ in ended] == [1, 1], ended  # torchrun's own
    message = "of 3, counted from 0, on host1, has failed: there was no sign of it for 4 s"
    said = [line for _, _, errors in ended for line in errors.splitlines() if "failed" in line or "ignal" in line]
    assert any(line.endswith(message) for line in said), said
    assert not own.output.exists()
    again = torchrun([first, other], sys.executable, "-c", own.program(SMALL), *own.arguments, env=environment())
    found = finished(again)
    if command == "audit":
        lines = [line for _, out, _ in found for line in out.splitlines(keepends=True)]
        found = [(0, "".join(lines), "")]
    assert own.result(found) == by_one.result(finished([single]))


# Saves of megatron-core


SAVES = [("0.16.1", "torch_dist"), ("0.14.0", "zarr")]


def save(
    on: Sequence[Host],
    version: str,
    backend: str,
    out: Path,
    *options: str,
    processes: int = 1,
    patience: int = 120,
    **variables: str,
) -> list[subprocess.Popen[str]]:
    """A training on the hosts that saves at its end; Gloo finds the others by the hosts' own addresses.

    `patience`: seconds for which a collective waits for a host that says nothing.
    """
    out.mkdir(exist_ok=True)
    program = [sys.executable, str(PROGRAMS / "saving_on_hosts.py"), str(out), backend, *options]
    own = environment_for(tree("megatron-core", version), "hook")
    own |= {"GLOO_SOCKET_IFNAME": "eth0", "FAKEGPU_PG_TIMEOUT": str(patience), **variables}
    return torchrun(on, *program, env=own, processes=processes)


def check_that_nothing_says_there_is_a_checkpoint(out: Path) -> None:
    left = {path.name for path in out.rglob("*")}
    assert left & {"latest_checkpointed_iteration.txt", "metadata.json", ".metadata"} == set()


def check_that_two_others_save_it(on: Sequence[Host], version: str, backend: str, out: Path) -> None:
    """By the same command, what one host alone saves."""
    ended = finished(save(on, version, backend, out))
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "3"
    alone = out.with_name("alone")
    by_one = finished(save(on[:1], version, backend, alone, processes=2))
    assert by_one[0][0] == 0, by_one
    assert audit(out / "iter_0000003", 1).verdict == WHOLE
    found, expected = (contents(folder / "iter_0000003") for folder in (out, alone))
    assert found.keys() == expected.keys()
    named = {".metadata"}  # torch gives each save a random number and its folder's name there
    assert {name for name in found if found[name] != expected[name]} <= named


@pytest.mark.parametrize(("version", "backend"), SAVES)
def test_a_save_of_megatron_core_on_two_hosts_of_which_one_is_lost(
    version: str, backend: str, make_hosts: MakeHosts, tmp_path: Path
) -> None:
    """The other ends, nothing says that there is a checkpoint, and the same command with another host saves it."""
    first, lost, other = make_hosts(3)
    out = tmp_path / "out"
    running = save([first, lost], version, backend, out, "--pause", "2")
    until(lambda: any(out.glob("begun.*")), running)  # in torch_dist this format is written by one rank alone
    begin = time.monotonic()
    lost.kill()
    ((status, _, errors),) = finished(running[:1])
    assert status == 1, errors
    assert time.monotonic() - begin < 60
    assert f"Connection closed by peer [{lost.address}]" in errors
    check_that_nothing_says_there_is_a_checkpoint(out)
    check_that_two_others_save_it([first, other], version, backend, out)


@pytest.mark.parametrize(("version", "backend"), SAVES if all_releases() else SAVES[:1])
def test_a_save_of_megatron_core_on_two_hosts_of_which_one_loses_its_network(
    version: str, backend: str, make_hosts: MakeHosts, tmp_path: Path
) -> None:
    """The other waits as long as its process group does, and no longer; then as with a host that is killed."""
    first, lost, other = make_hosts(3)
    out, patience = tmp_path / "out", 15
    running = save([first, lost], version, backend, out, "--pause", "0.2", patience=patience)
    until(lambda: any(out.glob("begun.*")), running)
    begin = time.monotonic()
    lost.cut_network()
    ((status, _, errors),) = finished(running[:1])
    assert status == 1, errors
    assert patience < time.monotonic() - begin < 60
    assert f"Timed out waiting {patience}000ms for" in errors
    check_that_nothing_says_there_is_a_checkpoint(out)
    lost.kill()  # its torchrun still asks the first host's store
    check_that_two_others_save_it([first, other], version, backend, out)
