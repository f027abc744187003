"""Run the demonstrations of several fixes in this environment in parallel, and print the outcome of each.

    python -m ckpt_patches.demo.prove JOBS DEMONSTRATION...

Imports take most of the time: one process imports the packages and forks for each demonstration. Prints one line of
JSON by demonstration name: {"bug": whether the bug shows, or null, "found": a description}.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ckpt_patches.demo import SHORT
from ckpt_patches.demo.run import TIMEOUT, Demonstration, end_group, environment, outcome_in

# The modules to import for a demonstration that names the key; they import torch and upstream. Otherwise only torch.
PRELOADED = {
    "megatron_training": ("ckpt_patches.demo.megatron_training", "megatron.core.dist_checkpointing"),
    "deepspeed_training": ("ckpt_patches.demo.deepspeed_training",),
    "zarr_saving": ("ckpt_patches.demo.zarr_saving",),
}


def prove(demonstrations: Sequence[Demonstration], environ: Mapping[str, str]) -> dict[str, tuple[bool | None, str]]:
    """By fix: whether its bug shows (None if the demonstration failed), and a description of the outcome."""
    groups: dict[str, list[Demonstration]] = {}
    for demonstration in demonstrations:
        text = demonstration.path.read_text(encoding="utf-8")
        groups.setdefault(next((name for name in PRELOADED if name in text), ""), []).append(demonstration)
    found: dict[str, tuple[bool | None, str]] = {}
    for group in groups.values():
        found |= _prove_group(group, environ)
    return found


def _prove_group(group: Sequence[Demonstration], environ: Mapping[str, str]) -> dict[str, tuple[bool | None, str]]:
    jobs = len(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "ckpt_patches.demo.prove", str(jobs), *(str(each.path) for each in group)]
    try:
        done = subprocess.run(command, env=dict(environ), text=True, capture_output=True, timeout=TIMEOUT + 60)
        found = json.loads(done.stdout.strip().splitlines()[-1])
        return {each.fix: (found[each.fix]["bug"], str(found[each.fix]["found"])) for each in group}
    except subprocess.TimeoutExpired:
        why = f"it took longer than {TIMEOUT:.0f} s"
    except (IndexError, KeyError, TypeError, ValueError):
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return {each.fix: (None, why) for each in group}


def variables(environ: Mapping[str, str], *, tree: str | None, mode: str) -> dict[str, str]:
    """The programs' environment variables: no GPU, the fixes of this environment, and `tree` first on the path.

    `strict` becomes `warn`, so that a fix that does not match does not stop the demonstrations of the others.
    """
    path = [tree] if tree is not None else []
    path += [environ["PYTHONPATH"]] if environ.get("PYTHONPATH") else []
    return {
        **environment(environ, patched=mode != "off"),
        "CKPT_PATCHES": "off" if mode == "off" else "warn",
        **({"CKPT_PATCHES_SKIP": environ["CKPT_PATCHES_SKIP"]} if "CKPT_PATCHES_SKIP" in environ else {}),
        **({"PYTHONPATH": os.pathsep.join(path)} if path else {}),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
    }


def main(jobs: int, paths: Sequence[Path]) -> None:
    signal.signal(signal.SIGALRM, _time_is_up)
    signal.alarm(int(TIMEOUT))
    with tempfile.TemporaryDirectory(prefix="ckpt-patches-prove-") as folder:
        with contextlib.suppress(TimeoutError):
            _preload(paths)
            _run_all(jobs, list(paths), Path(folder))
            signal.alarm(0)
        print("\n" + json.dumps({path.stem: _found(Path(folder, path.stem)) for path in paths}))


def _time_is_up(*_: object) -> None:
    raise TimeoutError


def _run_all(jobs: int, waiting: list[Path], folder: Path) -> None:
    """Run each program, and end the processes that it leaves behind.

    Raises:
        TimeoutError: they took longer than TIMEOUT together; the running ones are ended.
    """
    running: set[int] = set()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                # The alarm waits: a child that is not in `running` yet would not be ended.
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
                running.add(_fork(waiting.pop(0), folder))
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            assert ended is not None  # without WNOHANG
            end_group(ended.si_pid)
            os.waitpid(ended.si_pid, 0)
            running.discard(ended.si_pid)
    finally:
        for child in running:
            end_group(child)


def _preload(paths: Iterable[Path]) -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    for name, modules in PRELOADED.items():
        for module in modules if name in text else ():
            importlib.import_module(module)
    import torch  # noqa: F401


def _fork(path: Path, folder: Path) -> int:
    """Run a program in a forked process with its own process group. Returns the process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child != 0:
        return child
    with _exiting():
        os.setsid()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        for number, name in ((1, f"{path.stem}"), (2, f"{path.stem}.error")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
        signal.alarm(int(TIMEOUT) // 2)
        sys.argv = [str(path), SHORT]
        runpy.run_path(str(path), run_name="__main__")
    raise AssertionError


@contextlib.contextmanager
def _exiting() -> Iterator[None]:
    """End this process after the block without freeing memory (that takes a second) or waiting for threads."""
    status = 1
    try:
        yield
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _found(output: Path) -> dict[str, object]:
    if not output.exists():
        return {"bug": None, "found": f"not begun within {TIMEOUT:.0f} s"}
    outcome = outcome_in(output.read_text(errors="replace"))
    if outcome is not None:
        return {"bug": outcome.bug, "found": outcome.found}
    lines = output.with_name(f"{output.name}.error").read_text(errors="replace").strip().splitlines()
    return {"bug": None, "found": lines[-1] if lines else "no outcome"}


if __name__ == "__main__":
    main(int(sys.argv[1]), [Path(path) for path in sys.argv[2:]])
