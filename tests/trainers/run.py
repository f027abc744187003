"""Find the fixes' demonstrations, and run one in an environment.

from trainers import run
run.run(run.demonstrations()["round_robin_links"], run.environment(os.environ, patched=False))
"""

import ast
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_patches.runtime.ranks import RANK_VARIABLES
from trainers import gpu

BESIDE = "BESIDE"  # the name of a demonstration's constant
NOT_INHERITED = (*RANK_VARIABLES, "LOCAL_RANK", "WORLD_SIZE")  # set by a launcher
TIMEOUT = 900.0  # seconds


@dataclass(frozen=True)
class Demonstration:
    """A program that shows one bug, as its file describes it."""

    fix: str
    path: Path
    title: str  # "zarr save, 4 ranks"
    beside: tuple[tuple[str, str], ...]  # required distributions besides upstream, with versions


@dataclass(frozen=True)
class Outcome:
    """The outcome of a demonstration."""

    bug: bool
    found: str  # "4 of 12 slices lost, and no error"


class DemonstrationFailed(RuntimeError):
    """A demonstration failed: it showed neither the bug nor its absence."""


def demonstrations() -> dict[str, Demonstration]:
    """All demonstrations by fix, sorted by name."""
    paths = (Path(__file__).resolve().parents[1] / "demos").glob("*.py")
    return {path.stem: read(path) for path in sorted(paths, key=lambda path: path.stem)}


def read(path: Path) -> Demonstration:
    """Read a demonstration's title and requirements without importing it.

    Raises:
        ValueError: the file has no docstring.
    """
    module = ast.parse(path.read_text(encoding="utf-8"))
    title = (ast.get_docstring(module) or "").partition("\n")[0]
    if not title:
        raise ValueError(f"{path}: expected a docstring whose first line is the demonstration's title, found none")
    constants = [
        node for node in module.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == BESIDE
    ]
    beside = ast.literal_eval(constants[0].value) if constants else {}
    return Demonstration(path.stem, path, title, tuple(beside.items()))


def environment(environ: Mapping[str, str], *, patched: bool) -> dict[str, str]:
    """A demonstration's environment variables: `environ`, with the import hook on or off for all fixes."""
    kept = {k: v for k, v in environ.items() if k not in NOT_INHERITED and not k.startswith("CKPT_PATCHES")}
    accelerator = "cuda" if environ.get(gpu.SWITCH) == "1" else "cpu"
    kept["CKPT_PATCHES"] = "strict" if patched else "off"
    # On import, megatron-core 0.15 compiles for a GPU if torch supports one; torch then queries the GPU for this.
    architecture = {"TORCH_CUDA_ARCH_LIST": "9.0"} if accelerator == "cpu" else {}
    return {**architecture, **kept, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": accelerator}


def run(demonstration: Demonstration, environ: Mapping[str, str]) -> Outcome:
    """Run a demonstration with exactly these variables, which include upstream's Python path.

    Raises:
        DemonstrationFailed: it ended with an error, printed no outcome, or took longer than TIMEOUT.
    """
    command = [sys.executable, str(demonstration.path)]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        started = subprocess.Popen(command, env=dict(environ), stdout=output, stderr=errors, start_new_session=True)
        try:
            in_time = _ends_within(started.pid, TIMEOUT)
        finally:
            end_group(started.pid)
            started.wait()
        if not in_time:
            raise DemonstrationFailed(f"{demonstration.path}: took longer than {TIMEOUT:.0f} s")
        output.seek(0)
        errors.seek(0)
        done = subprocess.CompletedProcess(command, started.returncode, output.read(), errors.read())
    return outcome_of(demonstration, done)


def _ends_within(child: int, seconds: float) -> bool:
    """Whether a child ends in time. The child is not reaped, so its process id cannot be reused."""
    deadline = time.monotonic() + seconds
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def end_group(leader: int) -> None:
    """Kill a child that is not reaped yet, and the workers that it left in its process group."""
    os.kill(leader, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def outcome_of(demonstration: Demonstration, done: "subprocess.CompletedProcess[str]") -> Outcome:
    """The outcome of a demonstration that has run.

    Raises:
        DemonstrationFailed: it ended with an error, or printed no outcome.
    """
    outcome = outcome_in(done.stdout)
    if outcome is not None and done.returncode == 0:
        return outcome
    raise DemonstrationFailed(
        f"{demonstration.path}: expected exit status 0 and a last line with an outcome, "
        f"found exit status {done.returncode}:\n{_tail(done.stdout)}\n{_tail(done.stderr)}"
    )


def outcome_in(output: str) -> Outcome | None:
    """The outcome in the last line of a demonstration's output, or None if that line has no outcome."""
    try:
        outcome = json.loads(output.strip().splitlines()[-1])
        return Outcome(bool(outcome["bug"]), str(outcome["found"]))
    except (IndexError, KeyError, TypeError, ValueError):
        return None


def _tail(text: str, lines: int = 30) -> str:
    return "\n".join(text.splitlines()[-lines:])
