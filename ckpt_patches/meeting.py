"""Where the processes of a group meet: a folder, mostly beside the output, in which each of them has one small file.

The first process reads the files of all others, and they read its one: what it has heard of one it tells to all.

What a file says is trusted only if it repeats what its reader calls itself in this run, a random token: then it was
written after the reader had begun, and not in a run before this one, whose files may still be there. So a
process answers with the tokens that it has seen, and one that fails stays until it was heard, for some time.

A file changes at least every `BEAT` seconds. Its reader notices, on its own clock, whether it does: neither the clocks
of machines nor what a network file system says of a file's time need agree. A file is always replaced as a whole;
network file systems show that of a name that they know when it is opened, and a new name within a minute.

Who is silent for `SILENT` seconds is taken for dead, and nine signs are missing then. A process gives them whatever it
does: a thread of its own writes them, workers do the long reads and writes in processes of their own, and what is long
in this one, a write, an fsync, NumPy's loops, lets other threads run meanwhile. Where the shared folder itself answers
nobody, or where this process is the one that hung, the others could not be heard: a look at the files counts for
`A_LOOK_AT_MOST` seconds of silence, however long it took to come to it.

Where two processes are on one machine, the system says whether the other one still runs, and nobody waits for its sign.

What is larger than a sign is a message: a file of its own, which is opened only when the sender's sign has said that it
is there. The first process gets those of all others, and removes each; its own go to all, and stay to the end.
"""

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

from ckpt_patches.errors import UserError
from ckpt_patches.group import Group

BEAT = 5.0  # seconds between two signs of life
SILENT = 45.0  # seconds without one after which a process is taken for dead: all others end within a minute
A_LOOK_AT_MOST = 5.0  # seconds of silence that one look tells of; up to 2000 processes, looks are not so far apart
ABSENT = 600.0  # seconds that a process that has done its share waits for one that has never given a sign
HEARD = 30.0  # seconds for which one that ends stays at most, so that all others hear why
SEEN_OFF = 5.0  # seconds that a process whose work is done waits at most until the first has nothing more to do
A_MOMENT = 0.05  # seconds at most between two looks at what the thread has heard
SHORTEST, LONGEST = 0.01, 0.5  # seconds between two looks at the files
PATIENCE = 16  # a look after this part of the time that nothing has been heard, or that one has been waited for
A_LOOK = 0.002  # seconds between two looks for each file that is looked at: one process must not keep a disk busy

RUNNING, DONE, FAILED, FINISHED = "running", "done", "failed", "finished"


@dataclass(frozen=True)
class Marker:
    """What a process says."""

    token: str  # what it calls itself in this run
    heard: dict[str, str]  # by rank, the tokens that it has seen
    state: str = RUNNING
    failed: int = 0  # the rank of the process that failed, if one has
    failed_on: str = ""  # the name of its host, where that is known
    message: str = ""
    gone: bool = False  # it says nothing more
    beat: int = 0
    sent: int = 0  # messages
    place: str = ""  # where it runs, and its number there; empty if that cannot be told
    host: str = ""  # the name of the machine that it runs on


class OthersFailed(UserError):
    """Another process of this group has failed; `told`: it has said so, or the first process of it."""

    def __init__(self, rank: int, size: int, message: str, host: str = "", *, told: bool = False) -> None:
        elsewhere = f"on {host}, " if host not in ("", host_name()) else ""
        super().__init__(f"process {rank} of {size}, counted from 0, {elsewhere}has failed: {message}")
        self.rank, self.message, self.host, self.told = rank, message, host, told


class Meeting:
    """This process among the others of its group. Where it is alone, nothing is done.

    When the block is left by an exception, the others are told of it.
    """

    def __init__(self, group: Group, folder: Path) -> None:
        self._group, self._folder = group, folder
        self._own = Marker(os.urandom(8).hex(), {}, place=place(), host=host_name())
        everybody_else = [rank for rank in range(group.size) if rank != group.rank]
        self._others = everybody_else if group.rank == 0 else [0]  # whom it hears
        self._seen: dict[int, Marker] = {}  # those that are trusted
        self._silence: dict[int, float] = {}  # seconds since they came, as far as this process could have heard more
        self._looked = time.monotonic()
        self._dead: set[int] = set()  # those that have ended without a word
        self._received: dict[int, int] = {}  # messages
        self._written: Marker | None = None
        self._at = 0.0  # when it was written
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._news = threading.Event()  # this process has something to say, or begins to wait
        self._heard_news = threading.Event()
        self._quiet_since = time.monotonic()
        self._thread = threading.Thread(target=self._keep_talking, daemon=True)

    def __enter__(self) -> "Meeting":
        if self._others:
            self._folder.mkdir(0o700, parents=True, exist_ok=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._others:
            return
        if error is not None:
            self._say(FAILED, *self._reason(error))
        try:
            if error is None or isinstance(error, Exception):  # after Ctrl-C nothing is waited for
                self._until_heard()
        finally:
            self._end()

    def _reason(self, error: BaseException) -> tuple[int, str, str]:
        """Which process failed, on which host, and at what."""
        if isinstance(error, OthersFailed):
            return error.rank, error.host, error.message
        return self._group.rank, self._own.host, _message_of(error)

    def check(self) -> None:
        """That all is well with the others.

        Raises:
            OthersFailed: one has failed, or gives no sign of life any more.
        """
        for rank, marker in self._heard_of().items():
            if marker.state == FAILED:
                raise OthersFailed(marker.failed, self._group.size, marker.message, marker.failed_on, told=True)
            if rank in self._dead:
                message = "it has ended without a word, as one that is killed"
                raise OthersFailed(rank, self._group.size, message, marker.host)
            if self._is_silent(rank) and not marker.gone:
                message = f"there was no sign of it for {SILENT:.0f} s"
                raise OthersFailed(rank, self._group.size, message, marker.host)

    def _heard_of(self) -> dict[int, Marker]:
        with self._lock:
            return dict(self._seen)

    def _is_silent(self, rank: int) -> bool:
        return self._silence[rank] > SILENT

    def wait_for_shares(self) -> None:
        """Of the first process: until all others have done their shares.

        Raises:
            OthersFailed: one has not.
        """
        self._wait(DONE)

    def finish(self) -> None:
        """Of the first process: tell the others that the output is complete. Of the others: wait until they are told.

        Raises:
            OthersFailed: the output does not become complete.
        """
        if self._group.rank == 0:
            self._say(FINISHED)
        else:
            self._say(DONE)
            self._wait(FINISHED)

    def send(self, data: bytes) -> None:
        """Of the first process: a message to all others, in order. Of the others: to the first.

        Raises:
            OSError: it cannot be written.
        """
        self._put(self._message(self._group.rank, self._own), data)
        with self._lock:
            self._own = replace(self._own, sent=self._own.sent + 1)
        self._news.set()

    def receive(self, rank: int = 0) -> bytes:
        """The next message of a process: of the first one any other's, and of the others the first one's.

        Raises:
            OthersFailed: there will be none.
        """
        number = self._received.get(rank, 0)
        sender = self._wait_for([rank], lambda marker: marker.sent > number)[rank]
        path = self._message(rank, replace(sender, sent=number))
        data = path.read_bytes()
        if self._group.rank == 0:
            path.unlink()
        self._received[rank] = number + 1
        return data

    def _message(self, rank: int, sender: Marker) -> Path:
        """The file of its next message."""
        return self._folder / f"{rank}-{sender.token}-{sender.sent}"

    def _wait(self, state: str) -> None:
        self._wait_for(self._others, lambda marker: marker.state == state)

    def _wait_for(self, ranks: list[int], has_come: Callable[[Marker], bool]) -> dict[int, Marker]:
        """Until it has come of all these processes; their signs.

        Raises:
            OthersFailed: one has failed, or never comes.
        """
        begin = self._quiet_since = time.monotonic()
        self._news.set()
        while True:
            self._heard_news.clear()
            self.check()
            heard_of = self._heard_of()
            absent = [rank for rank in ranks if rank not in heard_of]
            if not absent and all(has_come(heard_of[rank]) for rank in ranks):
                return {rank: heard_of[rank] for rank in ranks}
            if absent and time.monotonic() - begin > ABSENT:
                message = f"there was never a sign of it, for {ABSENT:.0f} s (one that works alone takes --group none)"
                raise OthersFailed(absent[0], self._group.size, message)
            self._heard_news.wait(A_MOMENT)

    def _until_heard(self) -> None:
        """Stay until the others know how it ended here; the first process is the last to leave."""
        self._quiet_since = time.monotonic()
        until = time.monotonic() + HEARD
        while not self._is_heard() and time.monotonic() < until:
            self._heard_news.wait(A_MOMENT)
            self._heard_news.clear()

    def _is_heard(self) -> bool:
        """Whether all others know, or cannot hear any more. When they know it from the first process they are gone."""
        heard_of = self._heard_of()
        return all(rank in heard_of for rank in self._others) and all(
            marker.gone
            or rank in self._dead
            or self._is_silent(rank)
            or (self._group.rank != 0 and marker.state in (FAILED, FINISHED))
            for rank, marker in heard_of.items()
        )

    def _end(self) -> None:
        self._ended.set()
        self._news.set()
        self._thread.join()
        if self._group.rank == 0 and self._is_heard():
            shutil.rmtree(self._folder, ignore_errors=True)
        else:
            with self._lock:
                self._own = replace(self._own, gone=True)
            self._write()
            if self._own.state == DONE:
                self._until_seen_off()

    def _until_seen_off(self) -> None:
        """Until the first process has removed the folder: a launcher ends all when one ends with another status than 0,
        which may be the right one.
        """
        until = time.monotonic() + SEEN_OFF
        while (self._folder / str(self._group.rank)).exists() and 0 not in self._dead and time.monotonic() < until:
            time.sleep(SHORTEST)
            self._listen()

    def _say(self, state: str, failed: int = 0, failed_on: str = "", message: str = "") -> None:
        with self._lock:
            self._own = replace(self._own, state=state, failed=failed, failed_on=failed_on, message=message)
        self._news.set()

    def _keep_talking(self) -> None:
        """In a thread: listen, answer, and give signs of life, also while this process reads or plans."""
        while not self._ended.is_set():
            self._listen()
            if self._own != self._written or time.monotonic() - self._at > BEAT:
                self._write()
            quiet = (time.monotonic() - self._quiet_since) / PATIENCE
            self._news.wait(min(max(quiet, SHORTEST), LONGEST) + A_LOOK * (len(self._others) - 1))
            self._news.clear()

    def _listen(self) -> None:
        since, self._looked = self._looked, time.monotonic()
        passed = min(self._looked - since, A_LOOK_AT_MOST)
        for rank in self._others:
            is_dead = rank in self._seen and has_ended(
                self._seen[rank].place, self._own.place
            )  # before its last words are read
            self._silence[rank] = self._silence.get(rank, 0.0) + passed
            found = _read(self._folder / str(rank))
            if found is None:
                continue
            with self._lock:
                if self._own.heard.get(str(rank)) != found.token:
                    self._own = replace(self._own, heard={**self._own.heard, str(rank): found.token})
                answers = found.heard.get(str(self._group.rank)) == self._own.token
                if answers and self._seen.get(rank) != found:
                    self._seen[rank], self._silence[rank] = found, 0.0
                    self._tell_the_waiting()
                if is_dead and not (found.gone or found.state in (FAILED, FINISHED)):
                    self._dead.add(rank)
                    self._heard_news.set()

    def _tell_the_waiting(self) -> None:
        self._quiet_since = time.monotonic()
        self._heard_news.set()

    def _write(self) -> None:
        """What cannot be written now is written later; if it never can be, the others hear no sign."""
        with self._lock:
            own = self._own = replace(self._own, beat=self._own.beat + 1)
        with contextlib.suppress(OSError):
            self._put(self._folder / str(self._group.rank), json.dumps(asdict(own)).encode())
            self._written, self._at = own, time.monotonic()

    def _put(self, path: Path, data: bytes) -> None:
        """Write a file that is never seen in part."""
        temporary = path.with_name(f".{path.name}-{self._own.token}")
        temporary.write_bytes(data)
        os.replace(temporary, path)


def _message_of(error: BaseException) -> str:
    if isinstance(error, UserError | OSError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    return f"{type(error).__name__} {str(error).rpartition(os.linesep)[2]}".strip()


def _read(path: Path) -> Marker | None:
    """What a process says; None if there is nothing, or nothing that can be read."""
    try:
        return Marker(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def host_name() -> str:
    """What people call this machine."""
    return os.uname().nodename


def place() -> str:
    """Where this process runs: the machine since it was started, the space of process numbers, the number, and since
    when. Empty where the system does not tell.
    """
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{booted} {os.readlink('/proc/self/ns/pid')} {os.getpid()} {_started(os.getpid())}"
    except OSError:
        return ""


def has_ended(other: str, own: str) -> bool:
    """Whether the process that runs at a place has ended, seen from one's own; of another machine it is not known."""
    there = other.split()
    if not there or own.split()[:2] != there[:2]:
        return False
    try:
        return _started(int(there[2])) != there[3]
    except OSError:
        return True


def _started(process: int) -> str:
    """When a process has begun to run, in a unit of the system's; empty for one that has ended and is still listed."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]
