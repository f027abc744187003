"""Import modules once, then become a program again and again: each time a fork of this process runs one.

    zygote.py SOCKET MODULE...

SOCKET is the number of an open file: a socket of packets that listens. When all is imported, a fork of this process
answers each connection, first with a greeting. A request is JSON {"argv": [PROGRAM, ARGUMENT...], "cwd": FOLDER,
"environment": {NAME: VALUE or null}} with open files for standard output and error. Its answer is the exit status, as
subprocess gives it. The end of the connection ends the program. This process ends with its standard input, and is no
child of the process that started it.

The request {"modules": [MODULE...], "environment": {NAME: VALUE}} with open files for standard input, output and error
and a socket that listens makes one more process like this one, which has the modules of both, these variables and no
others, and the folders and the import hook that they ask for.

In the fork that runs a program everything is as `python PROGRAM ARGUMENT...` has it, but that the modules are there,
and that nothing is freed at its end, which takes a second for modules that another process has imported. Its process
group is its own, and is killed when it has ended.
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
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1  # of linux/prctl.h
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


def serve(number: int, modules: list[str]) -> tuple[str, list[str]]:
    """Import, then serve; returns in a fork for each program, with its arguments."""
    os.set_inheritable(number, False)
    gc.disable()  # it would look at all modules again and again
    for name in modules:
        importlib.import_module(name)
    gc.enable()
    if len(os.listdir("/proc/self/task")) != 1:
        print(
            f"expected no thread but the first, which alone a fork has, after the import of {modules}", file=sys.stderr
        )
        end_at_once(1)
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # what was imported is no garbage; to look would copy all of it into every child
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that answer leave nothing to wait for
    listening = socket.socket(fileno=number)
    while True:
        readable, _, _ = select.select([listening.fileno(), 0], [], [])
        if 0 in readable:
            os._exit(0)
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            return answer(connection)
        connection.close()


def answer(connection: socket.socket) -> tuple[str, list[str]]:
    """Answer one request; returns in the fork that is to be the program."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection.send(b"ready")
    packet, files, _, _ = socket.recv_fds(connection, MOST, 4)
    if not packet:
        os._exit(0)
    request = json.loads(packet)
    if "modules" in request:
        connection.close()
        return serve(another(request, files), request["modules"])
    parent = os.getpid()
    child = os.fork()
    if child != 0:
        for file in files:
            os.close(file)
        status = wait(child, connection)
        with contextlib.suppress(ConnectionError):
            connection.send(str(status).encode())
        os._exit(0)
    connection.close()
    prepare(request, files, parent)
    program, *arguments = request["argv"]
    return program, arguments


def another(request: dict[str, Any], files: list[int]) -> int:
    """Make this fork one more process that serves; its socket."""
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


def wait(child: int, connection: socket.socket) -> int:
    """The child's exit status, when it has ended, or was ended because nobody waits for it any more."""
    ended = os.pidfd_open(child)
    select.select([ended, connection.fileno()], [], [])
    os.kill(child, signal.SIGKILL)  # without effect on one that has ended: its process is there until it is waited for
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it has left behind
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def prepare(request: dict[str, Any], files: list[int], parent: int) -> None:
    """Make the child the process that was asked for."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    nobody = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate([nobody, *files]):
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
    end_at_once((code or 0) & 0xFF)


def end_at_once(status: int) -> NoReturn:
    """End without waiting for threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
