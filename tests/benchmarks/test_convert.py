"""Compare the one-pass converter with upstream's (fixed) and with `cp -r` on 1.2 GB of state, and print all figures.

ZeRO-1 on 768 ranks and ZeRO-3 on 64, 194 parameters, in the layout that the tests check against real trainings. Times
are medians of runs with a warm page cache, upstream's of one. CPU seconds are printed too, because other work on the
machine does not lengthen them. Targets are printed beside the results before they are asserted.
"""

import compileall
import json
import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from universal import command, differences, distinct, environment
from upstream import REPOSITORY, environment_for, newest, run, tree

VERSION = newest("deepspeed")
RUNS = 5  # of the short ones: they wait for the disk, and one in ten is delayed
MB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compile both converters, as pip does, even if the environment keeps Python from writing bytecode."""
    for package in ("ckpt_patches", "deepspeed_patches"):
        compileall.compile_dir(REPOSITORY / package, quiet=1)


@pytest.fixture(scope="module", params=["large_stage1", "large_stage3"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("large")
    run("write_parallel_checkpoint", out, request.param, tree=tree("deepspeed", VERSION), timeout=600)
    return Path(out, request.param, "global_step7")


def test_against_upstream_and_cp(source: Path, tmp_path: Path) -> None:
    nbytes = sum(path.stat().st_size for path in source.iterdir())
    short: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("one pass", lambda: run_ours(source, tmp_path / "ours")),
        ("cp", lambda: timed(["cp", "-r", str(source), str(fresh(tmp_path / "copy"))], dict(os.environ))),
    ]
    runs = [*short * RUNS, ("upstream", lambda: run_upstream(source, tmp_path / "upstream"))]
    random.Random(0).shuffle(runs)  # a run can be slower after one that wrote much, as upstream's does
    found = [(name, measured()) for name, measured in runs]
    theirs, own, copy = (
        median([one for other, one in found if other == name]) for name in ("upstream", "one pass", "cp")
    )
    plan, moving = own["plan_seconds"], own["seconds"] - own["plan_seconds"]
    created = {"upstream": distinct(tmp_path / "upstream"), "one pass": distinct(tmp_path / "ours")}
    (tmp_path / "upstream" / "tmp").rename(tmp_path / "temporary")

    load = ", ".join(f"{average:.1f}" for average in os.getloadavg())
    print(f"\n{source.parent.name}: {nbytes / 1e9:.2f} GB in {len(list(source.iterdir()))} files; load {load}")
    print(f"  upstream {told(theirs)}: {theirs['phases']}")
    ratios = [theirs[what] / own[what] for what in ("seconds", "cpu")]
    print(f"  one pass {told(own)}: {ratios[0]:.1f} times as fast, by processor time {ratios[1]:.1f} (to reach: 12)")
    print(f"  start-up and plan {plan:.2f} s (to reach: 1.5); moving {moving:.2f} s, cp -r {told(copy)}")
    print(f"  moving / cp -r: {moving / copy['seconds']:.1f} (to reach: 3)")
    print(f"  files created: {created} (to reach: a tenth)")
    print(f"  peak private memory: upstream {told_memory(theirs)}, one pass {told_memory(own)} (to reach: 64 a worker)")

    assert differences([(tmp_path / "upstream", tmp_path / "ours")]) == {str(tmp_path / "ours"): []}
    assert plan <= 1.5
    assert own["worker"] <= 64 * MB
    assert created["one pass"] <= created["upstream"] / 10
    assert moving <= 3 * copy["seconds"]
    assert theirs["seconds"] >= 12 * own["seconds"]


def told(found: dict[str, Any]) -> str:
    return f"{found['seconds']:.2f} s ({found['cpu']:.2f} s of processors)"


def told_memory(found: dict[str, Any]) -> str:
    return f"{found['peak'] / MB:.0f} MiB, {found['worker'] / MB:.0f} a worker"


def median(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run with the median time."""
    return sorted(found, key=lambda one: float(one["seconds"]))[len(found) // 2]


def run_ours(source: Path, output: Path) -> dict[str, Any]:
    fresh(output)
    found = timed(command(source, output, "--json"), environment(VERSION))
    return {**found, "plan_seconds": json.loads(found["lines"][-1][1])["plan_seconds"]}


def run_upstream(source: Path, output: Path) -> dict[str, Any]:
    """Run upstream's converter with the hook, as `python -m`, in a user's environment: torch chooses the number of
    threads. The temporary folder is kept, which saves half a second: after its removal, creating files would be slow
    (see `fresh`).
    """
    fresh(output)
    folders = ["--input_folder", str(source), "--output_folder", str(output)]
    workers = ["--num_extract_workers", "2", "--num_merge_workers", "2"]  # with two processors, the fastest
    module = [sys.executable, "-u", "-m", "deepspeed.checkpoint.ds_to_universal"]
    env = {**environment_for(tree("deepspeed", VERSION), "hook"), "CKPT_PATCHES_SKIP": "universal_converter"}
    del env["OMP_NUM_THREADS"]
    found = timed([*module, *folders, *workers, "--keep_temp_folder"], env)
    return {**found, "phases": phases(found["lines"], found["seconds"])}


def phases(lines: Sequence[tuple[float, str]], end: float) -> str:
    """The phases of upstream's run, named by its own headings, and their durations."""
    starts = [(at, line.strip("* .\n").partition(" ")[2]) for at, line in lines if line.startswith("*** ")]
    starts = [(at, what) for at, what in starts if what]
    ends = [*(at for at, _ in starts[1:]), end]
    told = [f"{what} {until - at:.1f} s" for (at, what), until in zip(starts, ends, strict=True) if until - at > 0.05]
    return ", ".join([f"start {starts[0][0]:.1f} s", *told])


def fresh(folder: Path) -> Path:
    """Rename the folder and truncate its files. The files stay: after many were removed, ext4 creates new ones slowly
    for some minutes, because it does not reuse their inodes at once.
    """
    if folder.exists():
        for path in filter(Path.is_file, folder.rglob("*")):
            os.truncate(path, 0)
        folder.rename(folder.with_name(f"{folder.name}-{time.monotonic_ns()}"))
    return folder


def timed(arguments: Sequence[str], env: dict[str, str]) -> dict[str, Any]:
    """Run a program; return its seconds, its lines with times, and the peak private memory with its children."""
    os.sync()  # no run waits for the writes of an earlier one
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(arguments, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stderr
    sampler = Sampler(process.pid)
    errors: list[str] = []
    reader = threading.Thread(target=lambda file: errors.append(file.read()), args=(process.stderr,))
    reader.start()
    lines = [(time.monotonic() - begin, line) for line in process.stdout]
    process.wait()
    seconds = time.monotonic() - begin
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    reader.join()
    assert process.returncode == 0, errors
    cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    sampler.stop()
    return {"seconds": seconds, "cpu": cpu, "lines": lines, "peak": sampler.peak, "worker": sampler.worker}


class Sampler(threading.Thread):
    """Samples the private memory of a process and its descendants ten times per second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._ended = pid, threading.Event()
        self.peak = self.worker = 0  # of all, of the largest child
        self.start()

    def run(self) -> None:
        while not self._ended.wait(0.05):
            found = [private_memory(pid) for pid in descendants(self._pid)]
            self.peak, self.worker = max(self.peak, sum(found)), max([self.worker, *found[1:]])

    def stop(self) -> None:
        self._ended.set()
        self.join()


def descendants(pid: int) -> list[int]:
    try:
        children = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [pid, *(found for child in children for found in descendants(child))]


def private_memory(pid: int) -> int:
    """In bytes."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))
