"""Hosts on one machine: each has a network, a name and process numbers of its own; a switch joins them.

They share the files of this machine, as hosts of a cluster share a network file system, and nothing else: what tells
processes of one machine from those of another takes them for machines. Each exists as long as its first process, which
ends when the test's does: nothing is left, however a session ends.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

TOOLS = ("unshare", "nsenter", "ip", "mount", "hostname")
PORT = "29400"  # of hosts that nobody else has
LIMIT = 90  # seconds until all have ended
# The first process of a host: it waits for the end of its input, which is that of the test.
FIRST = 'mount --bind "$1" /etc/hosts && hostname "$2" && ip link set lo up && echo ready && exec cat'


class NoHostsError(Exception):
    """Hosts cannot be made here; why."""


@dataclass(frozen=True)
class Host:
    """One of several."""

    name: str
    address: str
    first: int  # its first process, by this machine's number

    def start(self, *command: str | Path, env: Mapping[str, str] | None = None, **more: Any) -> subprocess.Popen[str]:
        """A command on it, whose output is kept."""
        inside = ["nsenter", f"--target={self.first}", "--net", "--uts", "--pid", "--mount", "--", *map(str, command)]
        return subprocess.Popen(
            inside, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, **more
        )

    def kill(self) -> None:
        """End all its processes, and the host: at once, so that none of them tells of another's end."""
        self.stop()
        self._signal(signal.SIGKILL, "pid", "net")

    def stop(self) -> None:
        """Nothing on it goes on: so a machine looks that hangs."""
        self._signal(signal.SIGSTOP, "pid")  # one that stands for another stops by itself when it sees that do so

    def go_on(self) -> None:
        self._signal(signal.SIGCONT, "pid", "net")

    def _signal(self, number: signal.Signals, *kinds: str) -> None:
        """To all that share such spaces with it, also to those that were begun meanwhile."""
        for kind, space in [(kind, os.readlink(f"/proc/{self.first}/ns/{kind}")) for kind in kinds]:
            told = set[int]()
            while new := _processes(kind, space) - told:
                for process in new:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, number)
                told |= new

    def cut_network(self) -> None:
        """Nobody reaches it any more, and it nobody."""
        _do("nsenter", f"--target={self.first}", "--net", "ip", "link", "set", "eth0", "down")


MakeHosts = Callable[[int], list[Host]]


@contextlib.contextmanager
def hosts(count: int, folder: Path) -> Iterator[list[Host]]:
    """So many hosts, which find each other by their names; `folder` is for a file of these.

    Raises:
        NoHostsError: the system or the user's rights do not allow it.
    """
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        raise NoHostsError(f"needs {', '.join(missing)}" if missing else "needs root, for network namespaces")
    named = {f"host{number}": f"10.77.0.{number + 1}" for number in range(count)}
    table = folder / "etc-hosts"
    table.write_text("".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **named}.items()))
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(_kept("unshare", "--net", "sh", "-c", "echo ready && exec cat"))
        in_switch = ("nsenter", f"--target={switch.pid}", "--net", "ip", "link")
        _do(*in_switch, "add", "switch", "type", "bridge")
        _do(*in_switch, "set", "switch", "up")
        made = []
        for number, (name, address) in enumerate(named.items()):
            apart = ("unshare", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
            keeper = stack.enter_context(_kept(*apart, "sh", "-c", FIRST, "sh", str(table), name))
            first = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()[0]
            port = f"port{number}"
            _do(*in_switch, "add", port, "type", "veth", "peer", "eth0", "netns", first)
            _do(*in_switch, "set", port, "master", "switch", "up")
            _do("nsenter", f"--target={first}", "--net", "ip", "address", "add", f"{address}/24", "dev", "eth0")
            _do("nsenter", f"--target={first}", "--net", "ip", "link", "set", "eth0", "up")
            made.append(Host(name, address, int(first)))
        yield made


@contextlib.contextmanager
def _kept(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has said that it is ready, and ends with this block, with all that it holds."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin
    assert process.stdout
    assert process.stderr
    try:
        if process.stdout.readline() != "ready\n":
            raise NoHostsError(f"{command[0]} failed: {process.stderr.read().strip()}")
        yield process
    finally:
        process.kill()  # a host's first process with it, and so all others
        process.communicate()


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoHostsError(f"{' '.join(command)} failed: {done.stderr.strip()}")


def _processes(kind: str, space: str) -> set[int]:
    """Those that share a space of a kind: of numbers, a host's own; of networks, also those started here for them."""
    found = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{name}/ns/{kind}") == space:
                found.add(int(name))
    return found


# What runs on them


def finished(running: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Of each its status, its output and its errors."""
    ended = [(*process.communicate(timeout=LIMIT), process.returncode) for process in running]
    return [(status, out, errors) for out, errors, status in ended]


def until(
    there: Callable[[], bool], running: Sequence[subprocess.Popen[str]] = (), said: Callable[[], object] = str
) -> None:
    """While all of these run; `said` is for the message, where it takes too long."""
    end = time.monotonic() + LIMIT
    while not there():
        assert time.monotonic() < end, said()
        assert [process.poll() for process in running] == [None] * len(running), finished(running)
        time.sleep(0.05)


def torchrun(
    on: Sequence[Host], *command: str, env: Mapping[str, str], processes: int = 1
) -> list[subprocess.Popen[str]]:
    """So many processes on each host."""
    options = ["--nnodes", str(len(on)), "--nproc-per-node", str(processes)]
    options += ["--rdzv-backend", "c10d", "--rdzv-id", "hosts"]
    options += ["--rdzv-endpoint", f"{on[0].name}:{PORT}", "--no-python"]
    started = [sys.executable, "-m", "torch.distributed.run", *options, *command]
    return [host.start(*started, env=env) for host in on]


class Heard:
    """What a process says, while it runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.lines: list[str] = []
        threading.Thread(target=self._listen, args=[process.stderr], daemon=True).start()

    def _listen(self, errors: IO[str]) -> None:
        self.lines.extend(errors)

    def ends(self) -> list[str]:
        """Why the watches of its ranks end them."""
        said = [line for line in self.lines if " ends in the middle of " in line]
        return [line.split(" ends in the middle of ")[1].split(": ", 1)[1] for line in said]
