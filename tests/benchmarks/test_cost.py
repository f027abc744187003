"""What the hook costs, measured in pairs that alternate in one run. `make bench` prints the figures."""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from upstream import tree

DISTRIB_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
NEWEST = "0.16.1"


def environment(root: Path | None = None, **switches: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("CKPT_PATCHES", "PYTHON"))}
    return {**kept, **({"PYTHONPATH": str(root)} if root else {}), **switches}


def seconds(command: list[str], env: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, env=env, check=True, capture_output=True)
    return time.perf_counter() - start


def paired(command: list[str], with_it: dict[str, str], without: dict[str, str], pairs: int) -> tuple[float, float]:
    """Median difference in milliseconds of `pairs` pairs, and the median without."""
    for env in (with_it, without):
        seconds(command, env)  # warm the caches
    differences, base = [], []
    for index in range(pairs):
        order = (with_it, without) if index % 2 else (without, with_it)
        times = {id(env): seconds(command, env) for env in order}
        differences.append(times[id(with_it)] - times[id(without)])
        base.append(times[id(without)])
    return statistics.median(differences) * 1000, statistics.median(base) * 1000


def show(name: str, value: float, base: float, limit: float) -> None:
    print(f"\n{name}: {value:+.2f} ms on {base:.1f} ms (figure to reach: {limit:g} ms)")


def test_interpreter_start() -> None:
    """Our .pth line against the same interpreter without it: `python -c pass`, and the line run in it."""
    site = subprocess.run(
        [sys.executable, "-c", "import ckpt_patches.startup as s; print(s.__file__)"], capture_output=True, text=True
    ).stdout.strip()
    root = str(Path(site).parent.parent)
    line = Path(root, "training_checkpoint_patches.pth").read_text()
    prepare = f"import sys; sys.path.insert(0, {root!r})\n"
    plain, ours = [sys.executable, "-I", "-S", "-c", prepare], [sys.executable, "-I", "-S", "-c", prepare + line]
    env, differences, base = environment(), [], []
    for index in range(201):
        order = (plain, ours) if index % 2 else (ours, plain)
        times = {id(command): seconds(command, env) for command in order}
        differences.append(times[id(ours)] - times[id(plain)])
        base.append(times[id(plain)])
    added, median = statistics.median(differences) * 1000, statistics.median(base) * 1000
    show("interpreter start", added, median, 1)


IMPORT = f"""
import importlib, json, sys, time, torch
import megatron.core.optimizer.optimizer
importlib.import_module("megatron.core.optimizer")
name = {DISTRIB_OPTIMIZER!r}
del sys.modules[name]
start = time.perf_counter()
importlib.import_module(name)
print(json.dumps(time.perf_counter() - start))
"""
# The whole of it, first: the plan of the tree is made when the first target is met.
FIRST = f"""
import importlib, json, sys, time, torch
start = time.perf_counter()
importlib.import_module({DISTRIB_OPTIMIZER!r})
print(json.dumps(time.perf_counter() - start))
"""


@pytest.mark.parametrize(("what", "program"), [("first import, plan included", FIRST), ("import again", IMPORT)])
def test_importing_the_distributed_optimizer(what: str, program: str) -> None:
    """3,000 lines; without the hook they come from bytecode."""
    root = tree("megatron-core", NEWEST)
    with_hook = environment(root, RANK="1")
    without = environment(root, RANK="1", CKPT_PATCHES="off")

    def inside(env: dict[str, str]) -> float:
        done = subprocess.run([sys.executable, "-c", program], env=env, check=True, capture_output=True, text=True)
        return float(json.loads(done.stdout.splitlines()[-1]))

    for env in (with_hook, without):
        inside(env)
    pairs = [(inside(with_hook), inside(without)) for _ in range(9)]
    added = statistics.median(a - b for a, b in pairs) * 1000
    show(f"distrib_optimizer, {what}", added, statistics.median(b for _, b in pairs) * 1000, 60)


def test_status() -> None:
    """On an environment with all packages."""
    root = f"{tree('megatron-core', '0.14.0')}{os.pathsep}{tree('deepspeed', '0.19.8')}"
    env = environment(None, PYTHONPATH=root)
    command = [sys.executable, "-m", "ckpt_patches", "status"]
    seconds(command, env)
    times = [seconds(command, env) for _ in range(15)]
    nothing = statistics.median(seconds([sys.executable, "-c", "pass"], env) for _ in range(15)) * 1000
    show("status", statistics.median(times) * 1000 - nothing, nothing, 500)
