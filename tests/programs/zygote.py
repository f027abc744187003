"""Import modules once, then become a program again and again: each time a fork of this process runs one.

    zygote.py SOCKET MODULE...

SOCKET is the number of an open file: a socket of packets that listens. When all is imported, a fork of this process
serves each who connects; it sends its number and this one's first. A request is JSON {"argv": [PROGRAM, ARGUMENT...],
"cwd": FOLDER, "environment": {NAME: VALUE or null}} with two open files for standard output and error. It is answered
with the exit status, as subprocess gives it. The packet "kill" ends the program before that. So does the end of the
connection, which ends the process that served it, too. This process ends with its standard input, and is no child of
who started it, who may have to know all of those. Nothing outlives who asked for it.

The request {"modules": [MODULE...], "environment": {NAME: VALUE}} with four open files, for standard input, output and
error and a socket that listens, is answered at once: there is one more process like this one then, which knows the
modules of both, has these variables and no others, and the folders and the import hook that they ask for.

In the fork that runs a program everything is as `python PROGRAM ARGUMENT...` has it, but that the modules are there,
and that nothing is freed at its end, which takes a second for modules that another process has imported. Its process
group is its own, and is killed when it is gone.
"""

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import sys
import threading
import types
from typing import Any

PR_SET_PDEATHSIG = 1  # of linux/prctl.h
KILL = b"kill"
MOST = 2**20  # bytes of a packet


def main() -> None:
    if os.fork() != 0:
        os._exit(0)
    program, arguments = serve(int(sys.argv[1]), sys.argv[2:])
    try:
        become(program, arguments)
    except SystemExit as ended:
        end(ended.code)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        end(1)
    end(None)


def serve(listening: int, modules: list[str]) -> tuple[str, list[str]]:
    """Import, then serve; it returns in a fork for each request, with the program and its arguments."""
    os.set_inheritable(listening, False)
    gc.disable()  # it would look at all modules again and again
    for name in modules:
        importlib.import_module(name)
    gc.enable()
    if len(os.listdir("/proc/self/task")) != 1:
        sys.exit(f"expected no thread but the first, which alone a fork has, after the import of {modules}")
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # what was imported is no garbage; to look would copy all of it into every child
    return wait_for_work(wait_for_client(socket.socket(fileno=listening)))


def wait_for_client(listening: socket.socket) -> socket.socket:
    """In this process it never returns; in a fork for each client it does, with the connection."""
    nobody = os.open(os.devnull, os.O_RDONLY)
    while True:
        readable, _, _ = select.select([listening.fileno(), 0], [], [])
        if 0 in readable:
            os._exit(0)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        requests, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            os.dup2(nobody, 0)
            os.close(nobody)
            requests.send(f"{os.getpid()} {os.getppid()}".encode())
            return requests
        requests.close()


def wait_for_work(requests: socket.socket) -> tuple[str, list[str]]:
    """In this process it never returns; in a fork for each request it does, with the program and its arguments."""
    parent = os.getpid()
    while True:
        packet, files, _, _ = socket.recv_fds(requests, MOST, 4)
        if not packet:
            os._exit(0)
        if packet == KILL:  # the program ended by itself, in the same moment
            continue
        request = json.loads(packet)
        child = os.fork()
        if child == 0:
            requests.close()
            if "modules" in request:
                return serve(another(request, files), request["modules"])
            prepare(request, files, parent)
            program, *arguments = request["argv"]
            return program, arguments
        for file in files:
            os.close(file)
        requests.send(str(wait(child, requests)).encode())


def another(request: dict[str, Any], files: list[int]) -> int:
    """Make the child one more process that imports, and no child of this one; its socket."""
    if os.fork() != 0:
        os._exit(0)
    os.setsid()
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
        os.close(file)
    own = folders_asked_for()
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[1 : 1 + len(own)] = folders_asked_for()
    import ckpt_patches

    ckpt_patches.run()  # as the .pth file does when an interpreter starts
    return files[3]


def folders_asked_for() -> list[str]:
    """Those that an interpreter puts into its path, behind that of the program."""
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def wait(child: int, requests: socket.socket) -> int:
    """The child's exit status, when it has ended, or was ended because a packet came."""
    ended = os.pidfd_open(child)
    readable, _, _ = select.select([ended, requests.fileno()], [], [])
    os.close(ended)
    wanted = requests.fileno() not in readable or requests.recv(MOST) == KILL
    os.kill(child, signal.SIGKILL)  # without effect on one that has ended: its process is there until it is waited for
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it has left behind
    if not wanted:
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def prepare(request: dict[str, Any], files: list[int], parent: int) -> None:
    """Make the child the process that was asked for."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    for name, value in request["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def become(program: str, arguments: list[str]) -> None:
    """Run the program as the main module."""
    module = types.ModuleType("__main__")
    vars(module).update(__file__=program, __builtins__=builtins)
    sys.modules["__main__"] = module
    sys.argv = [program, *arguments]
    sys.path[0] = os.path.dirname(os.path.realpath(program))
    with io.open_code(program) as file:
        code = compile(file.read(), program, "exec")
    exec(code, vars(module))


def end(code: object) -> None:
    """End as the interpreter does, with the code of a SystemExit."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    main()
