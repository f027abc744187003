"""Run programs in multiprocessing's fork server: importing torch and a package takes seconds, most of their time.

`python forks.py MODULE...` imports the modules, and runs the programs that its standard input names, a line each.
"""

import contextlib
import gc
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

# Variables that programs read at run time, and no import reads.
PER_RUN = ("MASTER_PORT", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
AT_ONCE = 6  # the idle servers of a test process, a quarter of a gigabyte each; they end when it closes their input
_idle: list[tuple[str, "subprocess.Popen[str]"]] = []  # a server answers one thread at a time; the last was used last
_lock = threading.Lock()


def run(
    argv: Sequence[str], environment: Mapping[str, str], timeout: float, modules: Sequence[str]
) -> "subprocess.CompletedProcess[str] | None":
    """Run a program like `subprocess.run`, with modules imported. Returns None if their import fails."""
    kept = {name: value for name, value in environment.items() if name not in PER_RUN}
    key = json.dumps([[*modules], sorted(kept.items())])
    server = _server(key, modules, kept)
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        with contextlib.suppress(BrokenPipeError):
            request = [timeout, argv, os.getcwd(), dict(environment), out.name, err.name]
            print(json.dumps(request), file=server.stdin, flush=True)
        answer = server.stdout.readline() if server.stdout else ""
        _put_back(key, server)
        if answer == "null\n":
            raise subprocess.TimeoutExpired(argv, timeout, out.read(), err.read())
        return subprocess.CompletedProcess([*argv], int(answer), out.read(), err.read()) if answer else None


def _server(key: str, modules: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[str]":
    with _lock:
        for at, (known, _) in enumerate(_idle):
            if known == key:
                return _idle.pop(at)[1]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    command = [sys.executable, __file__, *modules]
    return subprocess.Popen(command, env=environment, cwd="/", text=True, start_new_session=True, **pipes)


def _put_back(key: str, server: "subprocess.Popen[str]") -> None:
    with _lock:
        _idle.append((key, server))
        oldest = _idle.pop(0)[1] if len(_idle) > AT_ONCE else None
    if oldest:
        os.killpg(oldest.pid, signal.SIGKILL)  # an interpreter with torch takes seconds to end by itself
        oldest.wait()


def serve(modules: Sequence[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    del sys.path[0]
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([*modules])
    for line in sys.stdin:
        timeout, *request = json.loads(line)
        process = server.Process(target=become, args=request)
        process.start()
        process.join(timeout)
        code = process.exitcode
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        print(json.dumps(code), file=answers, flush=True)


def become(argv: list[str], folder: str, environment: Mapping[str, str], *files: str) -> None:
    """Run a program in this process."""
    gc.freeze()  # a collection need not look at what was imported, nor copy its pages
    os.setsid()
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = argv
    sys.path.insert(0, os.path.dirname(argv[0]))
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1:])
