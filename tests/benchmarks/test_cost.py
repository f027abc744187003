"""What the hook costs, measured in pairs that alternate in one run. `make bench` prints the figures."""

import json
import os
import statistics
import subprocess
import sys
import time
import venv
from pathlib import Path

import ckpt_patches
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


def show(name: str, value: float, base: float, limit: float) -> None:
    print(f"\n{name}: {value:+.2f} ms on {base:.1f} ms (figure to reach: {limit:g} ms)")


def test_interpreter_start(tmp_path: Path) -> None:
    """`python -c pass` in two environments, alike but for our .pth line."""
    root = Path(ckpt_patches.__file__).parent.parent
    interpreters = []
    for name in ("without", "with"):
        venv.create(tmp_path / name, with_pip=False)
        (site,) = (tmp_path / name / "lib").glob("python*/site-packages")
        (site / "__editable__.ours.pth").write_text(f"{root}\n")
        interpreters.append(str(tmp_path / name / "bin" / "python"))
    (site / "training_checkpoint_patches.pth").write_bytes((root / "training_checkpoint_patches.pth").read_bytes())
    env, differences, base = environment(), [], []
    for index in range(202):
        times = {python: seconds([python, "-c", "pass"], env) for python in interpreters[:: 1 if index % 2 else -1]}
        if index > 1:
            differences.append(times[interpreters[1]] - times[interpreters[0]])
            base.append(times[interpreters[0]])
    show("interpreter start", statistics.median(differences) * 1000, statistics.median(base) * 1000, 1)


# All that the module imports is there already: what is timed is the module, and with the hook the engine's own import,
# the plan of the whole tree, and compiling the edited source.
IMPORT = f"""
import importlib, json, os, sys, time, torch
import {DISTRIB_OPTIMIZER}
del sys.modules[{DISTRIB_OPTIMIZER!r}]
if sys.argv[1] == "hook":
    os.environ["CKPT_PATCHES"] = "warn"
    from ckpt_patches.startup import install
    install()
start = time.perf_counter()
module = importlib.import_module({DISTRIB_OPTIMIZER!r})
print(json.dumps([time.perf_counter() - start, type(module.__loader__).__name__]))
"""


def test_importing_the_distributed_optimizer() -> None:
    """3,000 lines; without the hook they come from bytecode."""
    env = environment(tree("megatron-core", NEWEST), RANK="1", CKPT_PATCHES="off")

    def timed(delivery: str) -> float:
        command = [sys.executable, "-c", IMPORT, delivery]
        done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
        elapsed, loader = json.loads(done.stdout.splitlines()[-1])
        assert loader == ("PatchedLoader" if delivery == "hook" else "SourceFileLoader")
        return float(elapsed)

    timed("none")
    pairs = [(timed("hook"), timed("none")) for _ in range(7)]
    added = statistics.median(a - b for a, b in pairs) * 1000
    show("importing distrib_optimizer", added, statistics.median(b for _, b in pairs) * 1000, 60)


def test_status() -> None:
    """On an environment with all packages."""
    root = f"{tree('megatron-core', '0.14.0')}{os.pathsep}{tree('deepspeed', '0.19.8')}"
    env = environment(None, PYTHONPATH=root)
    command = [sys.executable, "-m", "ckpt_patches", "status"]
    seconds(command, env)
    times = [seconds(command, env) for _ in range(15)]
    nothing = statistics.median(seconds([sys.executable, "-c", "pass"], env) for _ in range(15)) * 1000
    show("status", statistics.median(times) * 1000 - nothing, nothing, 500)
