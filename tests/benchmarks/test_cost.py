"""Measure the hook's cost in alternating pairs of runs. `make bench` prints the figures."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

from upstream import REPOSITORY, needed, newest, tree

DISTRIB_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
PTH = "training_checkpoint_patches.pth"


def environment(root: Path | None = None, **switches: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("CKPT_PATCHES", "PYTHON"))}
    path = [root, *needed(root)] if root else []
    return {**kept, **({"PYTHONPATH": os.pathsep.join(map(str, path))} if path else {}), **switches}


def seconds(command: list[str], env: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, env=env, check=True, capture_output=True)
    return time.perf_counter() - start


def show(name: str, value: float, base: float, limit: float) -> None:
    print(f"\n{name}: {value:+.2f} ms on {base:.1f} ms (figure to reach: {limit:g} ms)")


def test_interpreter_start(tmp_path: Path) -> None:
    """Print the time that our .pth line adds to `python -c pass`."""
    interpreters = []
    for name in ("without", "with"):
        venv.create(tmp_path / name, with_pip=False)
        (site,) = (tmp_path / name / "lib").glob("python*/site-packages")
        (site / "__editable__.ours.pth").write_text(f"{REPOSITORY}\n")
        interpreters.append(str(tmp_path / name / "bin" / "python"))
    (site / PTH).write_bytes((REPOSITORY / PTH).read_bytes())
    env, differences, base = environment(), [], []
    for index in range(202):
        times = {python: seconds([python, "-c", "pass"], env) for python in interpreters[:: 1 if index % 2 else -1]}
        if index > 1:
            differences.append(times[interpreters[1]] - times[interpreters[0]])
            base.append(times[interpreters[0]])
    show("interpreter start", statistics.median(differences) * 1000, statistics.median(base) * 1000, 1)


# A first import, after torch's, with upstream's bytecode cached: the hook adds its own import, planning the tree and
# compiling the edited modules. Python holds the import lock while it calls a finder. Times are CPU times, as other
# work may use the machine.
IMPORT = """
import importlib, json, sys, time, torch
from ckpt_patches.startup import PatchFinder, install
find_spec, held = PatchFinder.find_spec, [0.0]
def timed(*arguments):
    start = time.perf_counter()
    try:
        return find_spec(*arguments)
    finally:
        held.append(time.perf_counter() - start)
PatchFinder.find_spec = timed
hook = install()
start = time.process_time()
importlib.import_module(sys.argv[1])
print(json.dumps([time.process_time() - start, max(held), hook is not None]))
"""
RUNS = 7


@pytest.mark.parametrize(
    ("distribution", "module"),
    [
        ("megatron-core", DISTRIB_OPTIMIZER),
        ("deepspeed", "deepspeed"),
        ("torch", "torch.distributed.checkpoint.state_dict_saver"),
    ],
    ids=["core", "ds", "torch"],
)
def test_first_import_of_an_edited_package(distribution: str, module: str) -> None:
    root = tree(distribution, newest(distribution))

    def timed(mode: str) -> tuple[float, float]:
        command = [sys.executable, "-c", IMPORT, module]
        env = environment(root, CKPT_PATCHES=mode)
        done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
        elapsed, held, hooked = json.loads(done.stdout.splitlines()[-1])
        assert hooked is (mode == "strict")
        return float(elapsed), float(held)

    modes = ("off", "strict")
    timed("off")  # writes upstream's bytecode
    found = [{mode: timed(mode) for mode in modes[:: 1 if index % 2 else -1]} for index in range(RUNS)]
    base = statistics.median(one["off"][0] for one in found) * 1000
    added = statistics.median(one["strict"][0] - one["off"][0] for one in found) * 1000
    print(f"\nimporting {module}: {added:+.0f} ms on {base:.0f} ms, {added / base:.1%} (figure to reach: 5 %)")
    show("lock of the import system, longest", statistics.median(one["strict"][1] for one in found) * 1000, 0, 20)


IMPORT_TORCH = """
import time
begin = time.process_time()
import torch
print(time.process_time() - begin)
"""


def test_import_of_torch() -> None:
    """The finder sees each import of a module of torch, and looks at none before that of a checkpoint module."""

    def timed(mode: str) -> float:
        command = [sys.executable, "-c", IMPORT_TORCH]
        done = subprocess.run(command, env=environment(CKPT_PATCHES=mode), check=True, capture_output=True, text=True)
        return float(done.stdout)

    modes = ("off", "strict")
    found = [{mode: timed(mode) for mode in modes[:: 1 if index % 2 else -1]} for index in range(4 * RUNS)][2:]
    base = statistics.median(one["off"] for one in found) * 1000
    added = statistics.median(one["strict"] - one["off"] for one in found) * 1000
    print(f"\nimport torch: {added:+.1f} ms on {base:.0f} ms, {added / base:+.2%} (figure to reach: 1 %)")


def test_status() -> None:
    """Print the time of `status` with all packages installed."""
    root = f"{tree('megatron-core', '0.14.0')}{os.pathsep}{tree('deepspeed', newest('deepspeed'))}"
    env = environment(None, PYTHONPATH=root)
    command = [sys.executable, "-m", "ckpt_patches", "status"]
    seconds(command, env)
    times = [seconds(command, env) for _ in range(15)]
    nothing = statistics.median(seconds([sys.executable, "-c", "pass"], env) for _ in range(15)) * 1000
    show("status", statistics.median(times) * 1000 - nothing, nothing, 500)


# The hook's work on a rank at its first target module, without the package's own imports.
PLAN = """
import sys, time
begin = time.perf_counter()
from ckpt_patches.engine.plan import plan_tree
from ckpt_patches.engine.registry import TARGETS
assert plan_tree(sys.argv[1], TARGETS[sys.argv[2]]).files
print(time.perf_counter() - begin)
"""
OPENING = "open,openat,stat,newfstatat,lstat,statx,access,readlink,getdents64"


def test_64_processes_at_once_from_one_folder() -> None:
    """64 processes, more than a node's ranks, plan one tree at once with one copy of our package."""
    root = str(tree("megatron-core", newest("megatron-core")))
    cases = {
        "nothing": [sys.executable, "-c", "pass"],
        "planning": [sys.executable, "-c", PLAN, root, DISTRIB_OPTIMIZER],
    }
    env = environment(CKPT_PATCHES="off")
    for name, command in cases.items():
        begin = time.perf_counter()
        running = [
            subprocess.Popen(command, env={**env, "RANK": str(rank)}, stdout=subprocess.PIPE) for rank in range(64)
        ]
        assert [process.wait() for process in running] == [0] * 64
        taken = time.perf_counter() - begin
        print(f"\n64 processes, {name}: {taken:.2f} s on {os.cpu_count()} processors{calls(command, env)}")


def calls(command: list[str], env: dict[str, str]) -> str:
    """The number of file names that one process looks up; empty without strace."""
    if not shutil.which("strace"):
        return ""
    strace = ["strace", "-f", "-qq", "-c", "-U", "name,calls,errors", "-e", f"trace={OPENING}"]
    done = subprocess.run([*strace, *command], env=env, capture_output=True, text=True, check=True)
    total = next(line for line in done.stderr.splitlines() if line.strip().startswith("total"))
    return f"; {total.split()[1]} names are asked for"


# The check of the loaded code at exit, with all modules imported that fixes edit.
EXIT = """
import importlib, sys, time
import ckpt_patches
from ckpt_patches.engine.plan import module_path
from ckpt_patches.engine.registry import TARGETS
from ckpt_patches.hook import functions, running
import os
for module, package in TARGETS.items():
    if package == sys.argv[2] and os.path.exists(module_path(sys.argv[1], module)):
        importlib.import_module(module)
begin = time.perf_counter()
running.examine(ckpt_patches.installed.switches, at_exit=True)
print(sum(map(len, functions._ours.values())), (time.perf_counter() - begin) * 1000)
"""


@pytest.mark.parametrize(("distribution", "package"), [("megatron-core", "megatron.core"), ("deepspeed", "deepspeed")])
def test_look_at_exit(distribution: str, package: str) -> None:
    root = tree(distribution, newest(distribution))
    command = [sys.executable, "-c", EXIT, str(root), package]
    runs = [subprocess.run(command, env=environment(root), check=True, capture_output=True, text=True) for _ in "123"]
    found = [run.stdout.splitlines()[-1].split() for run in runs]
    assert all(int(functions) > 10 for functions, _ in found)
    show(f"{distribution}: look at exit, {found[0][0]} functions", min(float(took) for _, took in found), 0, 5)
