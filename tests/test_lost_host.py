"""A host that is lost in the middle of a save is named by the others, where CKPT_PATCHES_LOST_HOST asks for it."""

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckpt_patches.engine.plan import Outcome, fixes_for, plan_tree
from ckpt_patches.engine.registry import CORE, DEEPSPEED
from ckpt_patches.watch import lost_host, watch
from hosts import Heard, Host, MakeHosts, finished, torchrun, until
from test_several_hosts import SAVES, check_that_nothing_says_there_is_a_checkpoint, save
from universal import environment
from upstream import PROGRAMS, all_releases, environment_for, releases, run, tree

WATCH = {"CKPT_PATCHES_LOST_HOST": "8"}


# A host whose network is cut


def check_what_is_said_when_one_is_cut_off(
    made: Sequence[Host], number: int, running: Sequence[subprocess.Popen[str]], out: Path, processes: int
) -> None:
    """On each host by each rank, long before the process group gives up; its store is on the first one."""
    lost = made[number]
    until(lambda: any(out.glob("begun.*")), running)
    said = [Heard(process) for process in running]
    time.sleep(2)
    begin = time.monotonic()
    lost.cut_network()
    until(lambda: all(len(heard.ends()) == processes for heard in said), said=lambda: [heard.lines for heard in said])
    assert time.monotonic() - begin < 45
    for host, heard in zip(made, said, strict=True):
        for line in heard.ends():
            if (number == 0) == (host is lost):  # who can ask the store: the first one itself, or all but the lost one
                found = re.match(r"there has been no sign of life of (\w+) \(rank (\d)\) for 8 s", line)
                assert found, line
                name, rank = found.groups()
                assert made[int(rank) // processes].name == name
                assert (name == lost.name) == (number != 0)  # the first one, cut off, sees that another one is
            else:
                store = r"the process group's store, on host0, port \d+, has not answered for 8 s: host0 is lost, or"
                assert re.match(rf"{store} {host.name} is cut off from it", line), line


# One process on each host, and two.
CUTS = [(0, 1), (1, 2), *([(2, 1), (0, 2)] if all_releases() else [])]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "processes"), CUTS)
@pytest.mark.parametrize(("version", "backend"), SAVES if all_releases() else SAVES[:1])
def test_a_save_of_megatron_core_ends_with_the_name_of_a_host_that_loses_its_network(
    version: str, backend: str, number: int, processes: int, make_hosts: MakeHosts, tmp_path: Path
) -> None:
    made, out = make_hosts(3), tmp_path / "out"
    running = save(made, version, backend, out, "--pause", "2", processes=processes, patience=600, **WATCH)
    check_what_is_said_when_one_is_cut_off(made, number, running, out, processes)
    check_that_nothing_says_there_is_a_checkpoint(out)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1] if all_releases() else [1])
@pytest.mark.parametrize("kind", ["stage1", "stage3"] if all_releases() else ["stage3"])
def test_a_save_of_deepspeed_ends_with_the_name_of_a_host_that_loses_its_network(
    kind: str, number: int, make_hosts: MakeHosts, tmp_path: Path
) -> None:
    made = make_hosts(2)
    program = [sys.executable, str(PROGRAMS / "saving_zero_on_hosts.py"), str(tmp_path), kind]
    env = environment_for(tree("deepspeed", "0.19.8"), "hook") | {"GLOO_SOCKET_IFNAME": "eth0"} | WATCH
    running = torchrun(made, *program, env=env)
    check_what_is_said_when_one_is_cut_off(made, number, running, tmp_path, 1)
    assert not (tmp_path / "latest").exists()


# No false alarm


@pytest.mark.slow
def test_a_host_that_has_ended_its_work_is_not_lost(make_hosts: MakeHosts) -> None:
    """The last one goes on for three times as long as a silent one would have."""
    program = [sys.executable, str(PROGRAMS / "waiting_hosts.py"), "12"]
    env = {**environment(), "GLOO_SOCKET_IFNAME": "eth0", "CKPT_PATCHES_LOST_HOST": "4"}
    ended = finished(torchrun(make_hosts(3), *program, env=env))
    assert [status for status, _, _ in ended] == [0, 0, 0], ended
    assert [out for _, out, _ in ended] == [f"rank {rank} has saved\n" for rank in range(3)]


@pytest.mark.slow
def test_a_resume_is_watched_and_proven_at_once(tmp_path: Path) -> None:
    """Both lay something over the same functions; a save and a load of ranks that are all there."""
    on: dict[str, Any] = {"tree": tree("megatron-core", "0.19.2"), "delivery": "hook"}
    on["env"] = {"CKPT_PATCHES_FINGERPRINT": "1", **WATCH}
    for what in ("save", "resume"):
        options = ("--formats", "fully_reshardable", "--only", what, "--resume-ranks", "2")
        done = run("exact_resume", tmp_path, *options, **on)
        assert "fingerprint_megatron, lost_host_megatron" in done.stderr
    assert '"bit-equal"' in done.stdout
    assert "resume proven: 4 parameters, 12 states" in done.stderr


def test_a_look_that_comes_late_counts_for_no_more_than_two_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a process that was stopped, with all of its threads, takes nobody for lost."""
    now = [0.0]
    monkeypatch.setattr("ckpt_patches.watch.watch.time.monotonic", lambda: now[0])
    silence = watch.Silence(look_at_most=6)
    found = []
    for then, heard in [(3, False), (6, False), (5000, False), (5003, True), (5006, False)]:
        now[0] = then
        found.append(silence.look(heard=heard))
    assert found == [3, 6, 12, 0, 3]


def test_a_group_whose_store_is_on_no_host_is_not_watched_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CKPT_PATCHES_LOST_HOST", "8")
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        assert [lost_host.watched(len)("both") for _ in range(2)] == [4, 4]
    finally:
        dist.destroy_process_group()
    said = (
        "no lost host is noticed by this rank: TypeError: the process group's store is a HashStore, expected a TCPStore"
    )
    assert capsys.readouterr().err == f"ckpt-patches: CKPT_PATCHES_LOST_HOST: {said}\n"


# Where it is laid over, and where not


LOADED = "import sys; import megatron.core.dist_checkpointing; print('ckpt_patches.watch.lost_host' in sys.modules)"


@pytest.mark.parametrize(
    ("switch", "loaded"), [({}, "False"), ({"CKPT_PATCHES_LOST_HOST": "0"}, "False"), (WATCH, "True")]
)
def test_nothing_of_it_is_loaded_where_it_is_not_asked_for(switch: dict[str, str], loaded: str) -> None:
    env = environment_for(tree("megatron-core", "0.19.2"), "hook") | switch
    done = subprocess.run([sys.executable, "-c", LOADED], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [loaded]


def check_that_it_is_laid_over(root: Path, package: str, name: str) -> None:
    assert name not in fixes_for(package)
    results = plan_tree(str(root), package, fixes_for(package, overlays=["lost_host"])).results
    assert [result.outcome for result in results if result.name == name] == [Outcome.APPLIES]


@pytest.mark.parametrize("version", releases("megatron-core"))
def test_it_is_laid_over_each_release_of_megatron_core_where_it_is_asked_for(version: str) -> None:
    check_that_it_is_laid_over(tree("megatron-core", version), CORE, "lost_host_megatron")


@pytest.mark.parametrize("version", releases("deepspeed"))
def test_it_is_laid_over_each_release_of_deepspeed_where_it_is_asked_for(version: str) -> None:
    check_that_it_is_laid_over(tree("deepspeed", version), DEEPSPEED, "lost_host_deepspeed")
