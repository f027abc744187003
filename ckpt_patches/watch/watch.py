"""A rank's watch over the other hosts, by the store of the process group.

A rank that waits in a collective for a host that is gone hears nothing until the process group's time-out, and is then
not told which host it was. So each host gives signs of life, by a thread of the first of its ranks that comes here: it
adds to a counter in the store, from its first save or load until it ends. Hosts have numbers in the order in which they
come, and each looks at the counter of the one before it, the first one at that of the last: a few small messages a host
in each beat, however many hosts there are. Who finds one silent leaves its name in the store, where all ranks look
while they save or load.

The store is on a host too. Where it does not answer, the thread that asks it waits; so another one has the clock.

Silence is counted on one's own clock, in looks: each counts for no more than two beats, however late it comes. So a
process that was stopped itself, or held by one long call, does not take others for lost.

Nothing can be raised in a thread that waits inside of a collective: the process ends, with a line on stderr.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed

from ckpt_patches.meeting import host_name

BEAT = 3.0  # seconds between two signs of life, at most
SIGNS = 4  # as many fit into the patience, at least
HEARD = 2  # beats in which all ranks hear of a report; those who end before that would be taken for the lost ones
LAST_WORD = 2.0  # seconds for which the end of a process waits for it
BOOT = Path("/proc/sys/kernel/random/boot_id")  # what tells machines apart that have one name


class Silence:
    """Seconds without a sign, as far as one could have been heard."""

    def __init__(self, look_at_most: float) -> None:
        self._look_at_most, self._looked, self._seconds = look_at_most, time.monotonic(), 0.0

    def look(self, *, heard: bool) -> float:
        now = time.monotonic()
        self._seconds = 0.0 if heard else self._seconds + min(now - self._looked, self._look_at_most)
        self._looked = now
        return self._seconds


class Watch:
    """Of one rank, in one process group."""

    def __init__(self, group_store: Any, rank: int, patience: int) -> None:
        """Begin to give signs of life, if this is the first rank of its host.

        Args:
            group_store: of the process group: a TCPStore, or one that puts a prefix before its keys.
            rank: this one.
            patience: seconds without a sign of life after which a host is lost.

        Raises:
            TypeError: the group has another kind of store, which is on no host.
            RuntimeError: the store cannot be reached.
        """
        self._rank, self._patience = rank, patience
        self._beat = min(BEAT, patience / SIGNS)
        self._place = _place_of(group_store)
        # The group's own connection is for one at a time: where a rank waits by it, nobody else can ask.
        limit = timedelta(seconds=patience)
        self._store = distributed.TCPStore(*self._place, is_master=False, wait_for_workers=False, timeout=limit)
        token = group_store.compare_set("ckpt_patches/hosts", "", os.urandom(8).hex()).decode()
        self._keys = f"ckpt_patches/hosts/{token}"  # of this group alone: its own prefixes cannot be had
        self._number = self._number_of_host()  # None: another rank gives the signs of this host
        self._inside: list[str] = []  # the functions that run
        self._answers = 0  # of the store
        self._ended = threading.Event()
        self._talking = threading.Thread(target=self._talk, daemon=True)
        self._talking.start()
        threading.Thread(target=self._listen_for_answers, daemon=True).start()
        atexit.register(self.leave)

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """While this runs, a lost host ends this process."""
        self._inside.append(what)
        try:
            yield
        finally:
            self._inside.pop()

    def leave(self) -> None:
        """Say that this host gives no more signs and is not lost."""
        atexit.unregister(self.leave)
        self._ended.set()
        self._talking.join(LAST_WORD)

    def _number_of_host(self) -> int | None:
        host = f"{host_name()} {BOOT.read_text().strip() if BOOT.exists() else ''}"
        if self._store.add(self._key("ranks", host), 1) > 1:
            return None
        number = self._count("hosts", 1) - 1
        self._store.set(self._key("name", number), f"{host_name()} (rank {self._rank})")
        return number

    def _talk(self) -> None:
        """With the store, which may not answer."""
        before, silence = (-1, -1), Silence(2 * self._beat)
        with contextlib.suppress(RuntimeError):  # there is no store any more: that is for the other thread
            while not self._ended.wait(self._beat):
                if self._number is not None:
                    self._count("signs", 1, self._number)
                other = self._one_before() if self._inside else None
                found = (-1, -1) if other is None else (other, self._count("signs", 0, other))
                if silence.look(heard=other is None or found != before) > self._patience:
                    self._report(self._name(other))
                before = found
                self._look_for_a_report()
                self._answers += 1
            if self._number is not None:
                self._count("gone", 1, self._number)

    def _one_before(self) -> int | None:
        """The number of the host before this one that has not left; None if there is no such."""
        if self._number is None:
            return None
        hosts = self._count("hosts", 0)
        around = ((self._number - step) % hosts for step in range(1, hosts))
        return next((number for number in around if not self._count("gone", 0, number)), None)

    def _report(self, host: str) -> None:
        self._store.set(self._key("lost"), f"there has been no sign of life of {host} for {self._patience} s")

    def _look_for_a_report(self) -> None:
        if self._inside and self._store.check([self._key("lost")]):
            self._end(self._store.get(self._key("lost")).decode())

    def _listen_for_answers(self) -> None:
        answers, silence = 0, Silence(2 * self._beat)
        while not self._ended.wait(self._beat):
            heard = not self._inside or self._answers != answers
            answers = self._answers
            if silence.look(heard=heard) > self._patience:
                host, port = self._place
                self._end(
                    f"the process group's store, on {host}, port {port}, has not answered for {self._patience} s: "
                    f"{host} is lost, or {host_name()} is cut off from it"
                )

    def _end(self, reason: str) -> None:
        inside = self._inside[-1:]
        if not inside:
            return  # it has come to its end meanwhile
        what = f"ckpt-patches: rank {self._rank} on {host_name()} ends in the middle of {inside[0]}: {reason}"
        print(f"{what}. Start again without that host: ckpt-patches explain lost_host", file=sys.stderr, flush=True)
        time.sleep(HEARD * self._beat)
        os._exit(1)

    def _name(self, number: int | None) -> str:
        key = self._key("name", number)
        return (
            self._store.get(key).decode() if self._store.check([key]) else f"host {number}, which had not said its name"
        )

    def _count(self, what: str, by: int, *of: object) -> int:
        """A counter, to which something may be added; it need not have been there."""
        return int(self._store.add(self._key(what, *of), by))

    def _key(self, *parts: object) -> str:
        return "/".join([self._keys, *map(str, parts)])


def _place_of(store: Any) -> tuple[str, int]:
    while isinstance(store, distributed.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, distributed.TCPStore):
        raise TypeError(f"the process group's store is a {type(store).__name__}, expected a TCPStore")
    return store.host, store.port
