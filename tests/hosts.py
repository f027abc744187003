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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOOLS = ("unshare", "nsenter", "ip", "mount", "hostname")
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
        """End all its processes, and the host."""
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
