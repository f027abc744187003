"""What the hook costs, measured in pairs that alternate in one run. `make bench` prints the figures."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import venv
from pathlib import Path

from ckpt_patches.engine.registry import TARGETS
from upstream import REPOSITORY, needed, newest, tree

DISTRIB_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
NEWEST = newest("megatron-core")
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
    """`python -c pass` in two environments, alike but for our .pth line."""
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


# All that the targets import is there already: what is timed is those that distrib_optimizer imports, and with the hook
# the engine's own import, the plan of the whole tree, and compiling the edited source. The lock of the import system is
# held as long as a finder is asked.
IMPORT = f"""
import importlib, json, os, sys, time, torch
import {DISTRIB_OPTIMIZER}
for name in {list(TARGETS)!r}:
    sys.modules.pop(name, None)
held = [0.0]
if sys.argv[1] == "hook":
    os.environ["CKPT_PATCHES"] = "strict"
    from ckpt_patches.startup import PatchFinder, install
    find_spec = PatchFinder.find_spec
    def timed(*arguments):
        start = time.perf_counter()
        try:
            return find_spec(*arguments)
        finally:
            held.append(time.perf_counter() - start)
    PatchFinder.find_spec = timed
    install()
start = time.perf_counter()
module = importlib.import_module({DISTRIB_OPTIMIZER!r})
elapsed = time.perf_counter() - start
print(json.dumps([elapsed, max(held), type(module.__loader__).__name__]))
"""


def test_importing_the_distributed_optimizer(tmp_path: Path) -> None:
    """3,000 lines; without the hook they come from bytecode, with it from the plan that the first process has kept."""
    root = tree("megatron-core", NEWEST)
    nowhere = environment(root, RANK="1", CKPT_PATCHES="off", XDG_CACHE_HOME="")
    keeping = {**nowhere, "RANK": "0", "XDG_CACHE_HOME": str(tmp_path)}
    taking = {**keeping, "RANK": "1"}
    environments = {"none": nowhere, "made": {**nowhere, "HOME": "/dev/null"}, "kept": taking}

    def timed(name: str, env: dict[str, str]) -> tuple[float, float]:
        command = [sys.executable, "-c", IMPORT, "none" if name == "none" else "hook"]
        done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
        elapsed, held, loader = json.loads(done.stdout.splitlines()[-1])
        assert loader == ("SourceFileLoader" if name == "none" else "PatchedLoader")
        return float(elapsed), float(held)

    timed("none", nowhere)
    timed("kept", keeping)
    found = [{name: timed(name, env) for name, env in environments.items()} for _ in range(9)]
    base = statistics.median(one["none"][0] for one in found) * 1000
    for name, figure in (("kept", 60), ("made", 200)):
        added = statistics.median(one[name][0] - one["none"][0] for one in found) * 1000
        show(f"importing distrib_optimizer, plan {name}", added, base, figure)
    show("lock of the import system, longest", max(one[name][1] for one in found for name in one) * 1000, 0, 20)


def test_status() -> None:
    """On an environment with all packages."""
    root = f"{tree('megatron-core', '0.14.0')}{os.pathsep}{tree('deepspeed', newest('deepspeed'))}"
    env = environment(None, PYTHONPATH=root)
    command = [sys.executable, "-m", "ckpt_patches", "status"]
    seconds(command, env)
    times = [seconds(command, env) for _ in range(15)]
    nothing = statistics.median(seconds([sys.executable, "-c", "pass"], env) for _ in range(15)) * 1000
    show("status", statistics.median(times) * 1000 - nothing, nothing, 500)


# Of a rank, what the hook does at its first target module, without what the package itself imports.
PLAN = """
import sys, time
begin = time.perf_counter()
from ckpt_patches.engine.plan_cache import plan_or_kept
from ckpt_patches.engine.plan import fixes_for
from ckpt_patches.engine.registry import TARGETS
package = TARGETS[sys.argv[2]]
assert plan_or_kept(sys.argv[1], package, fixes_for(package)).files
print(time.perf_counter() - begin)
"""
OPENING = "open,openat,stat,newfstatat,lstat,statx,access,readlink,getdents64"


def test_64_processes_at_once_from_one_folder(tmp_path: Path) -> None:
    """All of a node's ranks and more read one tree, one package of ours and one folder of kept plans."""
    root = str(tree("megatron-core", NEWEST))
    kept = {**environment(), "XDG_CACHE_HOME": str(tmp_path), "RANK": "0"}
    own = [sys.executable, "-c", PLAN, root, DISTRIB_OPTIMIZER]
    cases = {
        "nothing": ([sys.executable, "-c", "pass"], {**kept, "CKPT_PATCHES": "off"}),
        "plan kept": (own, kept),
        "plan made": (own, {**kept, "XDG_CACHE_HOME": "", "HOME": "/dev/null"}),
    }
    subprocess.run(own, env=kept, check=True, capture_output=True)
    for name, (command, env) in cases.items():
        begin = time.perf_counter()
        running = [
            subprocess.Popen(command, env={**env, "RANK": str(rank)}, stdout=subprocess.PIPE) for rank in range(64)
        ]
        assert [process.wait() for process in running] == [0] * 64
        taken = time.perf_counter() - begin
        print(f"\n64 processes, {name}: {taken:.2f} s on {os.cpu_count()} processors{calls(command, env)}")


def calls(command: list[str], env: dict[str, str]) -> str:
    """How often one process asks the file system for a name, where strace can say it."""
    if not shutil.which("strace"):
        return ""
    strace = ["strace", "-f", "-qq", "-c", "-U", "name,calls,errors", "-e", f"trace={OPENING}"]
    done = subprocess.run([*strace, *command], env=env, capture_output=True, text=True, check=True)
    total = next(line for line in done.stderr.splitlines() if line.strip().startswith("total"))
    return f"; {total.split()[1]} names are asked for"
