"""Import modules once, then run programs: each in its own fork of this process.

    zygote.py SOCKET MODULE...

SOCKET is the number of an open file: a listening packet socket. After the imports, a fork of this process answers each
connection, first with a greeting. A request is JSON {"argv": [PROGRAM, ARGUMENT...], "cwd": FOLDER, "environment":
{NAME: VALUE or null}} with open files for standard output and error. The answer is the exit status, as subprocess
defines it. The end of the connection ends the program. This process ends when its standard input closes, and is not a
child of the process that started it.

The request {"modules": [MODULE...], "environment": {NAME: VALUE}} with open files for standard input, output and error
and a listening socket starts another process like this one. It has the modules of both, exactly these variables, and
the folders and the import hook that they define.

A program's fork equals `python PROGRAM ARGUMENT...`, with two differences: the modules are already imported, and
nothing is freed at the end, which would take a second for modules that another process imported. It has its own process
group, which is killed when it has ended.
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

PR_SET_PDEATHSIG = 1  # from linux/prctl.h
MOST = 2**20  # bytes per packet


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
    """Import and serve; return in a fork for each program, with the program and its arguments."""
    os.set_inheritable(number, False)
    gc.disable()  # it would scan all modules repeatedly
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
    gc.freeze()  # imported objects are not garbage; a scan would copy them all into every child
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # answering forks need no wait
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
    """Answer one request; return in the fork that becomes the program."""
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
    """Make this fork another serving process; return its socket."""
    os.setsid()
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
        os.close(file)
    own = folders_asked_for()
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[1 : 1 + len(own)] = folders_asked_for()
    import ckpt_patches

    ckpt_patches.run()  # as the .pth file does at interpreter startup
    return files[3]


def folders_asked_for() -> list[str]:
    """The folders that an interpreter adds to its path, after the program's."""
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def wait(child: int, connection: socket.socket) -> int:
    """The child's exit status, after it has ended or was killed because the connection ended."""
    ended = os.pidfd_open(child)
    select.select([ended, connection.fileno()], [], [])
    os.kill(child, signal.SIGKILL)  # harmless if it has ended: its process exists until it is waited for
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # its remaining child processes
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def prepare(request: dict[str, Any], files: list[int], parent: int) -> None:
    """Turn the child into the requested process."""
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
