"""Several processes audit and repair together, started by a launcher: each reads its share, the first one reports."""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import shared
import test_audit
from ckpt_patches.audit.audit import audit, fingerprint
from ckpt_patches.audit.blocks import CERTAIN
from ckpt_patches.audit.checksums import PartRead
from ckpt_patches.audit.copies import begin_copy, copy_ranges, end_copy
from ckpt_patches.audit.damages import NOTE
from ckpt_patches.audit.replies import Reply, decoded, encoded
from ckpt_patches.audit.scan import Odd, OddRuns, Part, Tally
from ckpt_patches.audit.shares import shares
from ckpt_patches.demo.ranks import free_port
from ckpt_patches.errors import UserError
from ckpt_patches.group import Group
from megatron_checkpoints import ZARR, ZARR_TP, written
from test_audit_many import arrays
from test_audit_many import written as by_hand
from test_audit_repair import contents
from test_audit_shifted import DEFAULT, saved
from test_ds_to_universal_group import ELSEWHERE, IMPATIENT, MPIRUN, POD, SRUN, TORCHRUN
from upstream import all_releases

LIMIT = 60  # seconds until a process has ended


# How work is divided


@pytest.mark.quick
@hypothesis.given(st.lists(st.integers(0, 1 << 40), max_size=50), st.integers(1, 20))
def test_shares_are_neighbours_and_all_there_is(costs: list[int], count: int) -> None:
    found = shares(costs, count)
    assert [item for own in found for item in own] == list(range(len(costs)))
    assert len(found) == count
    # None has more than its part and a half of the item at each of its ends.
    assert all(sum(costs[item] for item in own) <= sum(costs) / count + max(costs, default=0) for own in found)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("environment", "usable", "workers"),
    [
        ({}, 1, 1),
        ({}, 6, 6),
        ({}, 96, 16),
        ({**TORCHRUN, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, 32, 8),
        ({**TORCHRUN, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, 4, 1),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3(x2),4", "SLURM_CPUS_ON_NODE": "24"}, 24, 6),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x12)", "SLURM_CPUS_ON_NODE": "24"}, 12, 12),  # bound to its own
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 12, 4),
        (POD, 12, 12),
    ],
)
def test_the_processors_of_a_machine_are_divided_among_its_processes(
    environment: dict[str, str], usable: int, workers: int
) -> None:
    assert Group.of(environment).workers(usable) == workers


# What is sent


@st.composite
def parts(draw: st.DrawFn) -> Part:
    count = draw(st.integers(0, 5))
    edges = sorted(draw(st.sets(st.integers(0, 1 << 50), min_size=2 * count, max_size=2 * count)))
    code = draw(st.lists(st.integers(1, 0xFFFF), min_size=count, max_size=count))
    runs = OddRuns(np.array(edges[::2], np.int64), np.array(edges[1::2], np.int64), np.array(code, np.uint16))
    tallies = draw(st.dictionaries(st.sampled_from(sorted(CERTAIN)), st.builds(Tally, *[st.integers(0, 1 << 50)] * 3)))
    number = st.integers(0, 1 << 40)
    pieces = draw(st.lists(st.builds(PartRead, st.text(), number, number, number), max_size=3))
    return Part(draw(number), Odd(runs, draw(st.booleans()), tallies), pieces)


def plain(reply: Reply) -> Any:
    own = [
        (p.shard, [column.tolist() for column in p.odd.runs], p.odd.is_cut, p.odd.tallies, p.pieces)
        for p in reply.parts
    ]
    return reply._replace(parts=[]), own


replies = st.builds(
    Reply,
    st.integers(1, 1000),
    st.text(),
    st.lists(parts(), max_size=4),
    st.booleans(),
    st.none() | st.tuples(st.text(), st.text()),
)


@pytest.mark.quick
@hypothesis.given(replies)
def test_what_is_sent_is_what_comes(reply: Reply) -> None:
    assert plain(decoded(encoded(reply))) == plain(reply)


@pytest.mark.quick
@hypothesis.given(replies, st.data())
def test_what_is_not_all_there_is_refused(reply: Reply, data: st.DataObject) -> None:
    whole = encoded(reply)
    with pytest.raises(UserError, match="is no reply"):
        decoded(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(UserError, match="1 bytes too many"):
        decoded(whole + b"x")


# Processes


def start(
    arguments: list[str | Path],
    *options: str,
    rank: int = 0,
    size: int = 1,
    change: str = "",
    largest_file: int = -1,
    env: dict[str, str] | None = None,
) -> subprocess.Popen[str]:
    """A process of the command, with something in it changed."""
    program = f"""
import errno, json, os, sys, time
from pathlib import Path
from ckpt_patches import cli, meeting
from ckpt_patches.audit import audit, copies, coverage, others, scan
from ckpt_patches.formats import ranged
{change}
sys.exit(cli.main(sys.argv[1:]))
"""
    launched = {**TORCHRUN, "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": "29500"} if size > 1 else {}
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE") and not k.startswith("SLURM_")}
    limit = (largest_file, resource.RLIM_INFINITY)
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments), *options],
        env={**kept, **launched, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, limit) if largest_file >= 0 else None,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Status, output, and errors but for what the first process takes itself for."""
    out, errors = process.communicate(timeout=LIMIT)
    lines = [line for line in errors.splitlines(True) if ", counted from 0, by " not in line]
    return process.returncode, out, "".join(lines)


def alone(*arguments: str | Path) -> tuple[int, str, str]:
    return ended(start(list(arguments)))


def group(*arguments: str | Path, size: int = 2, change: str = "") -> list[tuple[int, str, str]]:
    return [ended(p) for p in [start(list(arguments), rank=rank, size=size, change=change) for rank in range(size)]]


def damaged_zarr(to: Path) -> Path:
    path = test_audit.copied(written(ZARR_TP).whole[-1], to)
    for parameter, change in ((test_audit.UP, lose), (test_audit.EMBEDDING, put_nan)):
        for file in sorted(path.glob(f"optimizer.state.*.{parameter}/[0-9]*")):
            change(file)
    return path


def lose(file: Path) -> None:
    if ".sync" not in str(file) and "exp_avg" in str(file):
        np.memmap(file, np.float32, "r+")[7:200] = 0


def put_nan(file: Path) -> None:
    np.memmap(file, np.float32, "r+")[-5:] = np.nan


def damaged_torch_dist(to: Path) -> Path:
    path = test_audit.copied(written(test_audit.TORCH_DIST).whole[-1], to)
    test_audit.flip_an_element(path)
    return path


def damaged_stage_3(to: Path) -> Path:
    path = test_audit.copied(test_audit.stage3_groups(), to)
    test_audit.flip_in_file(test_audit.rank_file(path, 0), test_audit.rank_file(path, 0).stat().st_size // 2)
    return path


DAMAGED = {
    "zarr": damaged_zarr,
    "torch_dist": damaged_torch_dist,
    "shifted": lambda _: saved(DEFAULT),
    "stage 2": lambda _: test_audit.damaged_zero() / "lose_partition",
    "stage 3": damaged_stage_3,
}


@pytest.mark.parametrize("size", [2, 5] if all_releases() else [3])
@pytest.mark.parametrize(
    "make",
    [pytest.param(make, id=name, marks=[pytest.mark.slow] if name != "zarr" else []) for name, make in DAMAGED.items()],
)
def test_several_say_what_one_says(make: Callable[[Path], Path], size: int, tmp_path: Path) -> None:
    path = make(tmp_path)
    status, out, errors = alone("audit", "--json", path)
    assert (status, errors) == (1, "")
    first, *others = group("audit", "--json", path, size=size)
    assert first == (status, out, "")
    assert others == [(status, "", "")] * (size - 1)
    assert not list(path.parent.glob(".ckpt-patches-group-*"))


def test_several_checkpoints_one_after_the_other(tmp_path: Path) -> None:
    """Whole, damaged, unreadable, and one that is not named."""
    run = tmp_path / "run"
    damaged_zarr(run)
    shutil.copytree(written(ZARR).whole[-1], run / "a_whole_one")
    test_audit.put_a_folder_in_place_of_a_chunk(Path(shutil.copytree(run / "a_whole_one", run / "another")))
    arguments = ("audit", "--json-lines", run, test_audit.stage3_groups())
    found = alone(*arguments)
    assert [json.loads(line)["verdict"] for line in found[1].splitlines()].count("whole") == 2
    assert len(found[1].splitlines()) == 4
    several = group(*arguments)
    assert several[0][1].splitlines() == found[1].splitlines()
    assert several == [found, (found[0], "", "")]


RECORDS = """
read, pid = ranged.RangedFiles.read, os.getpid()
def recorded(self, path, offset, into):
    print(json.dumps([path, offset, len(into)]), file=sys.stderr)
    read(self, path, offset, into)
ranged.RangedFiles.read = recorded
"""


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: written(ZARR_TP).whole[-1], test_audit.stage3_groups], ids=["zarr", "stage3"])
def test_each_byte_is_read_by_one_process(make: Callable[[], Path]) -> None:
    def reads(errors: str) -> list[tuple[str, int, int]]:
        return [tuple(json.loads(line)) for line in errors.splitlines()]

    single = start(["audit", make(), "--workers", "1"], change=RECORDS)
    every = reads(ended(single)[2])
    size = 3
    several = [start(["audit", make(), "--workers", "1"], rank=r, size=size, change=RECORDS) for r in range(size)]
    own = [reads(ended(process)[2]) for process in several]
    assert sorted(read for share in own for read in share) == sorted(every)
    most = max(nbytes for _, _, nbytes in every)
    for share in own:
        nbytes = sum(nbytes for _, _, nbytes in share)
        assert 0 < nbytes <= sum(nbytes for _, _, nbytes in every) / size + 4 * most


def test_a_large_file_is_divided(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "one", arrays(100, 64))
    change = f"scan.SPAN = scan.BLOCK = 1000\n{RECORDS}"
    found = [start(["audit", path, "--workers", "1"], rank=rank, size=2, change=change) for rank in range(2)]
    files = [{json.loads(line)[0] for line in ended(process)[2].splitlines()} for process in found]
    assert files[0] == files[1]


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    path = damaged_zarr(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    torchrun += ["--master_port", str(free_port()), "-m", "ckpt_patches", "audit", "--json", str(path)]
    done = subprocess.run(torchrun, capture_output=True, text=True, timeout=300)
    assert done.stdout == alone("audit", "--json", path)[1]
    assert done.returncode == 1
    assert not list(path.parent.glob(".ckpt-patches-group-*"))


def test_by_hand_in_a_pod_all_is_audited(tmp_path: Path) -> None:
    path = damaged_zarr(tmp_path)
    status, out, errors = ended(start(["audit", "--json", path], env=POD))
    assert (status, out) == alone("audit", "--json", path)[:2]
    assert errors.startswith("ckpt-patches: RANK=3 and WORLD_SIZE=8 are set, but not by torchrun, srun or mpirun")
    assert len(errors.splitlines()) == 1


def test_processes_that_were_called_with_different_checkpoints_leave_none_out(tmp_path: Path) -> None:
    paths = [by_hand(tmp_path / name, arrays(10, 8)) for name in ("a", "b")]
    found = [ended(p) for p in [start(["audit", path], rank=rank, size=2) for rank, path in enumerate(paths)]]
    assert [status for status, _, _ in found] == [2, 2]
    assert f"process 0 does an audit {paths[0]}, and this one was called to do an audit {paths[1]}" in found[0][2]
    assert [ended(start(["audit", path, "--group", "none"], rank=1, size=2))[0] for path in paths] == [0, 0]


def test_where_they_meet(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "run" / "one", arrays(10, 8))
    (tmp_path / "no_folder").touch()
    for status, _, errors in group("audit", path, "--meet", tmp_path / "no_folder"):
        assert status == 2
        assert "the processes of the group cannot meet there: Not a directory; name a folder" in errors
    seen = "see = others.obey\ndef look(*given):\n    print(os.listdir(sys.argv[-1]), file=sys.stderr)\n" + (
        "    return see(*given)\nothers.obey = look"
    )
    (tmp_path / "here").mkdir()
    before = os.stat(path.parent).st_mtime_ns
    found = group("audit", path, "--meet", tmp_path / "here", change=seen)
    assert [status for status, _, _ in found] == [0, 0]
    assert ".ckpt-patches-group-" in found[1][2]
    assert os.listdir(tmp_path / "here") == []
    assert os.stat(path.parent).st_mtime_ns == before


# One that fails

DISK_FAILS = """
read = ranged.RangedFiles.read
def fail(self, path, offset, into): raise OSError(errno.EIO, os.strerror(errno.EIO), "a disk")
ranged.RangedFiles.read = fail
"""


def test_a_share_that_cannot_be_read_is_a_finding_and_the_next_checkpoint_is_judged(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        by_hand(tmp_path / name, arrays(100, 64))
    second = "scan.SPAN = 1000\ntell, failing, ranged.RangedFiles.read = others.tell_share, fail, read\n" + (
        "def once(path, *more):\n"
        "    ranged.RangedFiles.read = failing if path.name == 'b' else read\n"
        "    tell(path, *more)\n"
        "others.tell_share = once"
    )
    arguments: list[str | Path] = ["audit", "--json-lines", tmp_path]
    first = start(arguments, rank=0, size=2, change="scan.SPAN = 1000")
    broken = start(arguments, rank=1, size=2, change=f"{DISK_FAILS}{second}")
    status, out, errors = ended(first)
    assert (status, errors) == (3, "")
    found = [json.loads(line) for line in out.splitlines()]
    assert [one["verdict"] for one in found] == ["whole", "could not tell", "whole"]
    ((only,),) = [one["findings"] for one in found if one["findings"]]
    assert (only["name"], only["array"], only["detail"]) == ("unreadable", "a disk", os.strerror(5))
    assert ended(broken) == (3, "", "")


def test_processes_that_find_different_files_judge_nothing(tmp_path: Path) -> None:
    by_hand(tmp_path / "a", arrays(100, 64))
    fewer = "scan.SPAN = 1000\nall_shards = audit.all_shards\naudit.all_shards = lambda found: all_shards(found)[:0]"
    other = "scan.SPAN = 1000\nall_shards = audit.all_shards\n" + (
        "def changed(found):\n"
        "    one, = all_shards(found)\n"
        "    return [type(one)(one.parameter, 'another', one.shape, one.streams)]\n"
        "audit.all_shards = changed"
    )
    for change in (fewer, other):
        first = start(["audit", "--json", tmp_path], rank=0, size=2, change="scan.SPAN = 1000")
        second = start(["audit", "--json", tmp_path], rank=1, size=2, change=change)
        status, out, _ = ended(first)
        assert status == 3
        ((finding,),) = [one["findings"] for one in json.loads(out)["checkpoints"]]
        assert finding["name"] == "unreadable"
        assert "process 1 has found other files in it than process 0" in finding["detail"]
        assert ended(second)[0] == 3


def test_every_part_of_what_is_read_is_in_the_fingerprint(tmp_path: Path) -> None:
    first, second = (audit(by_hand(tmp_path / name, arrays(rows, 8))).checkpoint for name, rows in (("a", 9), ("b", 8)))
    assert fingerprint(first.shards) != fingerprint(second.shards)
    assert fingerprint(first.shards) == fingerprint(list(first.shards)) != fingerprint([])


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A checkpoint that takes many seconds to read, in holes of the disk."""
    path = tmp_path / "iter_0000001"
    numel = 1 << 34
    (path / "weight").mkdir(parents=True)
    metadata = {"shape": [numel], "chunks": [numel], "dtype": "<f4", "compressor": None, "filters": None, "order": "C"}
    (path / "weight" / ".zarray").write_text(json.dumps(metadata))
    with open(path / "weight" / "0", "wb") as chunk:
        chunk.truncate(4 * numel)
    torch.save({"optimizer": {"param_groups": [{"step": 1}]}}, path / "common.pt")
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    return path


def have_met(beside: Path, size: int) -> bool:
    """Each has heard of the first, and the first of all."""
    names = [folder / str(rank) for folder in beside.glob(".ckpt-patches-group-*") for rank in range(size)]
    if not names or not all(name.exists() for name in names):
        return False
    return len({token for name in names for token in json.loads(name.read_bytes())["heard"].values()}) == size


def wait_until_they_read(beside: Path, size: int) -> None:
    until = time.monotonic() + LIMIT
    while not have_met(beside, size):
        assert time.monotonic() < until
        time.sleep(0.05)
    time.sleep(1)


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("", "it has ended without a word, as one that is killed"),
        (f"{IMPATIENT}\n{ELSEWHERE}", "there was no sign of it for 2 s"),
    ],
    ids=["same machine", "another"],
)
def test_one_that_is_killed_ends_the_others_within_seconds(large: Path, killed: int, change: str, message: str) -> None:
    running = [start(["audit", large], rank=rank, size=3, change=change) for rank in range(3)]
    wait_until_they_read(large.parent, 3)
    running[killed].kill()
    begin = time.monotonic()
    found = [ended(process) for process in running]
    assert time.monotonic() - begin < 20
    said = f"ckpt-patches: process {killed} of 3, counted from 0, has failed: {message}\n"
    # The first one says it for all; without it each of the others does.
    expected = [(2, "", said if 0 in (rank, killed) else "") for rank in range(3)]
    expected[killed] = (-9, "", "")
    assert found == expected


@pytest.mark.slow
def test_ctrl_c_ends_all(large: Path) -> None:
    running = [start(["audit", large], rank=rank, size=2) for rank in range(2)]
    wait_until_they_read(large.parent, 2)
    running[1].send_signal(2)
    assert ended(running[0]) == (
        2,
        "",
        "ckpt-patches: process 1 of 2, counted from 0, has failed: it was interrupted\n",
    )
    assert ended(running[1]) == (130, "", "ckpt-patches: interrupted\n")


# Repair


@pytest.mark.slow
@pytest.mark.parametrize("older", [False, True])
def test_a_repair_by_several_is_that_by_one(older: bool, tmp_path: Path) -> None:
    path = damaged_zarr(tmp_path)
    for file in path.glob(f"*.{test_audit.EMBEDDING}/[0-9]*"):  # what no repair can do
        shutil.copyfile(written(ZARR_TP).whole[-1] / file.relative_to(path), file)
    (path / "empty").touch()
    (path / "more").mkdir(0o750)
    (path / "more" / "file").write_text("text")
    os.chmod(path / "more" / "file", 0o640)
    options = ["--from", str(written(ZARR_TP).whole[-1])] if older else []
    status, out, errors = alone("repair", path, "--output", tmp_path / "by_one", *options)
    assert (status, errors) == (0, "")
    small = "copies.AT_A_TIME = 1000"  # so that files are cut
    found = group("repair", path, "--output", tmp_path / "by_three", *options, size=3, change=small)
    assert found == [(0, out.replace("by_one", "by_three"), ""), *[(0, "", "")] * 2]
    assert contents(tmp_path / "by_one") == contents(tmp_path / "by_three")
    assert modes(tmp_path / "by_one") == modes(tmp_path / "by_three")
    assert {str(name): mode for name, mode in modes(path).items()}.items() <= modes(tmp_path / "by_three").items()
    assert sorted(os.listdir(tmp_path)) == ["by_one", "by_three", path.name]


def modes(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mode for p in folder.rglob("*") if ".sync" not in str(p)}


def test_a_repair_of_a_shifted_one_by_several(tmp_path: Path) -> None:
    assert alone("repair", saved(DEFAULT), "--output", tmp_path / "by_one")[0] == 0
    assert [status for status, _, _ in group("repair", saved(DEFAULT), "--output", tmp_path / "by_two")] == [0, 0]
    assert contents(tmp_path / "by_one") == contents(tmp_path / "by_two")


def test_a_repair_that_is_refused(tmp_path: Path) -> None:
    path = damaged_zarr(tmp_path)
    test_audit.remove_array(path)
    found = group("repair", path, "--output", tmp_path / "new")
    assert found == [(2, "", alone("repair", path, "--output", tmp_path / "new")[2]), (2, "", "")]
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_repair_of_which_one_process_cannot_write(failing: int, tmp_path: Path) -> None:
    states = arrays(3000, 64)
    weights = states["fp32_param"].copy()
    states["fp32_param"][7:50] = 0
    path = by_hand(tmp_path / "damaged", states, weights)
    running = [
        start(
            ["repair", path, "--output", tmp_path / "new"],
            rank=rank,
            size=2,
            largest_file=100_000 if rank == failing else -1,
        )
        for rank in range(2)
    ]
    begin = time.monotonic()
    found = [ended(process) for process in running]
    assert time.monotonic() - begin < 20
    assert [status for status, _, _ in found] == [2, 2]
    assert "File too large" in found[0][2]
    assert os.listdir(tmp_path) == ["damaged"]


def test_a_copy_is_the_same_however_it_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_patches.audit.copies.AT_A_TIME", 7)
    monkeypatch.setattr("ckpt_patches.audit.copies.BUFFER", 3)
    source = tmp_path / "source"
    (source / "a" / "b").mkdir(parents=True)
    for size in range(30):
        (source / "a" / f"{size}").write_bytes(bytes(range(size)))
    (source / "a" / "x.sync").mkdir()
    (source / "link").symlink_to(source / "a" / "29")
    ranges = begin_copy(source, tmp_path / "copy", but="*.sync")
    assert max(found.end - found.begin for found in ranges) == 7
    for own in (ranges[::2], ranges[1::2]):
        copy_ranges(own, source, tmp_path / "copy", lambda: None)
    end_copy(source, tmp_path / "copy")
    shutil.copytree(source, tmp_path / "by_the_library", ignore=shutil.ignore_patterns("*.sync"))
    assert contents(tmp_path / "copy") == contents(tmp_path / "by_the_library")
    assert sorted(map(str, (p.relative_to(tmp_path / "copy") for p in (tmp_path / "copy").rglob("*")))) == sorted(
        map(str, (p.relative_to(tmp_path / "by_the_library") for p in (tmp_path / "by_the_library").rglob("*")))
    )
    assert not (tmp_path / "copy" / "link").is_symlink()


def test_what_is_no_file_is_not_copied(tmp_path: Path) -> None:
    os.mkfifo(shared.folder() / f"pipe-{os.getpid()}")
    source = tmp_path / "source"
    source.mkdir()
    (source / "pipe").symlink_to(shared.folder() / f"pipe-{os.getpid()}")
    with pytest.raises(UserError, match="expected a file or a folder, which can be copied, found neither"):
        begin_copy(source, tmp_path / "copy", but="*.sync")


def test_nothing_is_a_note_that_one_has_not_said(tmp_path: Path) -> None:
    """The list of an earlier repair is looked at by the first process alone."""
    path = damaged_zarr(tmp_path)
    for file in path.glob(f"*.{test_audit.EMBEDDING}/[0-9]*"):
        shutil.copyfile(written(ZARR_TP).whole[-1] / file.relative_to(path), file)
    assert alone("repair", path, "--output", tmp_path / "repaired")[0] == 0
    single = alone("audit", "--json", tmp_path / "repaired")
    assert "repaired" in {f["name"] for f in json.loads(single[1])["checkpoints"][0]["findings"]}
    assert {f["severity"] for f in json.loads(single[1])["checkpoints"][0]["findings"]} == {NOTE}
    assert group("audit", "--json", tmp_path / "repaired") == [single, (0, "", "")]
