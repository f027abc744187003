"""Measure the hook's cost in alternating pairs of runs. `make bench` prints the figures."""

import json
import os
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
finder = install()
start = time.process_time()
importlib.import_module(sys.argv[1])
elapsed = time.process_time() - start
syntax = 0.0  # seconds to parse and compile each edited module once
if finder is not None:
    import ast, gc
    from ckpt_patches.hook import running
    gc.disable()
    for file in (file for tree in running.trees(finder.switches) for file in tree.plan.files.values()):
        start = time.process_time()
        ast.parse(file.original)
        compile(file.original, file.path, "exec", dont_inherit=True)
        syntax += time.process_time() - start
print(json.dumps([elapsed, max(held), syntax, finder is not None]))
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

    def timed(mode: str) -> tuple[float, float, float]:
        command = [sys.executable, "-c", IMPORT, module]
        env = environment(root, CKPT_PATCHES=mode)
        done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
        elapsed, held, syntax, hooked = json.loads(done.stdout.splitlines()[-1])
        assert hooked is (mode == "strict")
        return float(elapsed), float(held), float(syntax)

    modes = ("off", "strict")
    timed("off")  # writes upstream's bytecode
    found = [{mode: timed(mode) for mode in modes[:: 1 if index % 2 else -1]} for index in range(RUNS)]
    base = statistics.median(one["off"][0] for one in found) * 1000
    added = statistics.median(one["strict"][0] - one["off"][0] for one in found) * 1000
    syntax = statistics.median(one["strict"][2] for one in found) * 1000
    print(f"\nimporting {module}: {added:+.0f} ms on {base:.0f} ms")
    print(
        f"  {added / syntax:.2f} times the {syntax:.0f} ms to parse and compile what is edited (figure to reach: 1.3)"
    )
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
