"""The ranks of one command, on one or several hosts: `torch.distributed` over Gloo, set up by a launcher.

All ranks take the same steps in the same order. Each step ends with an exchange of results and errors. After an error
of any rank, all ranks stop and rank 0 reports it. Detecting dead hosts and restarting is the launcher's task.
"""

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from ckpt_patches.errors import UserError, one_line

START = timedelta(minutes=10)  # timeout for all ranks to start; also for an exchange, after its barrier
STEP = timedelta(hours=6)  # how long ranks wait for the last one at the end of a step
MOST_WORKERS = 16  # of one rank, unless --workers sets another number
TORCHRUN = "TORCHELASTIC_RUN_ID"
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# A pod sets the first two as well, also for a command that runs once: they alone do not indicate a launcher.
OTHERS = (VARIABLES[:2], ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))

Result = TypeVar("Result")


class OtherRankError(UserError):
    """Another rank failed, and rank 0 reports it; this rank prints nothing."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks of a command. The default is a single rank, which needs no torch."""

    rank: int = 0
    size: int = 1
    processors: int = 0  # this rank's share of its host's processors; 0: all that it may use
    hosts: tuple[str, ...] = ()  # by rank

    @property
    def workers(self) -> int:
        """The number of worker processes of this rank."""
        return max(1, min(MOST_WORKERS, self.processors or len(os.sched_getaffinity(0))))

    def gather(self, step: str, work: Callable[[], Result]) -> list[Result]:
        """Run `work` on every rank. Returns on rank 0 all results, by rank; on other ranks only their own.

        Raises:
            Exception: the error of `work`, on rank 0 or for a single rank.
            UserError: on rank 0, another rank failed; on any rank, a rank is missing.
            OtherRankError: on the other ranks, a rank failed.
        """
        if self.size == 1:
            return [work()]
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        with self._loss_named(step):
            from torch import distributed

            distributed.monitored_barrier(timeout=STEP)
            outcomes: list[Any] | None = [None] * self.size if self.rank == 0 else None
            distributed.gather_object((result, _message_of(error)), outcomes)
            failed = self._broadcast(next((rank for rank, own in enumerate(outcomes or ()) if own[1]), None))
        if failed is None:
            return [own for own, _ in outcomes or [(result, "")]]
        if outcomes is None:
            raise OtherRankError(f"{self._named(failed)} failed at {step}")
        raise error or UserError(f"{self._named(failed)}: {outcomes[failed][1]}")

    def first(self, step: str, work: Callable[[], Result]) -> Result | None:
        """Run `work` on rank 0 while the others wait; None on the others. Raises as `gather`."""
        return self.gather(step, work if self.rank == 0 else lambda: None)[0]

    def share(self, step: str, work: Callable[[], Result]) -> Result:
        """Run `work` on rank 0, and return its result on all ranks. Raises as `gather`."""
        own = self.first(step, work)
        with self._loss_named(step):
            result: Result = self._broadcast(own)
        return result

    def agree(self, step: str, work: Callable[[], Result], by: Callable[[Result], object]) -> Result:
        """Run `work` on every rank. Returns the own result. Raises as `gather`, and a UserError if `by` differs."""
        own: list[Result] = []

        def compared() -> object:
            own.append(work())
            return by(own[0])

        found = self.gather(step, compared)
        self.first(step, lambda: self._check_equal(step, found))
        return own[0]

    def _check_equal(self, step: str, found: list[object]) -> None:
        for rank, other in enumerate(found):
            if other != found[0]:
                raise UserError(
                    f"{self._named(rank)} differs from rank 0 at {step}: expected the same command and the same files "
                    "on all ranks; check that each host has the folder mounted, and that nothing writes to it"
                )

    def _broadcast(self, value: Any) -> Any:
        """Rank 0's value."""
        if self.size == 1:
            return value
        from torch import distributed

        values = [value]
        distributed.broadcast_object_list(values, src=0)
        return values[0]

    @contextlib.contextmanager
    def _loss_named(self, step: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise UserError(
                f"{self._lost(str(error))} is missing at the end of {step}: it was killed, or hung for {STEP}; see "
                "what it printed, and run the same command again"
            ) from None

    def _lost(self, error: str) -> str:
        """The rank that caused an error of a collective: rank 0 finds it by the barrier or by a closed connection."""
        if late := re.search(r"Rank (\d+) failed to pass", error):
            return self._named(int(late[1]))
        closed = [rank for rank in range(1, self.size) if _is_closed(rank)] if self.rank == 0 else []
        return self._named(closed[0]) if closed else "rank 0, or one that it names,"

    def _named(self, rank: int) -> str:
        return f"rank {rank} of {self.size} on {self.hosts[rank]}"


def _is_closed(rank: int) -> bool:
    """Whether the connection to a rank is closed: Gloo then refuses to begin a transfer."""
    import torch
    from torch import distributed

    try:
        distributed.irecv(torch.empty(1), src=rank, tag=1)
    except RuntimeError:
        return True
    return False


def _message_of(error: Exception | None) -> str:
    """One line for a user's mistake; the traceback for a defect."""
    if error is None:
        return ""
    if isinstance(error, UserError | OSError):
        return one_line(error) or type(error).__name__
    return f"a defect, please report it with what follows:\n{''.join(traceback.format_exception(error)).rstrip()}"


def place(wanted: bool | None, environment: Mapping[str, str]) -> tuple[int, int]:
    """This process's rank and the number of ranks: 0 and 1, unless under torchrun or `wanted` (--distributed).

    Raises:
        UserError: variables are missing, or wrong.
    """
    if not (TORCHRUN in environment if wanted is None else wanted):
        return 0, 1
    rank, size, *_ = found = [environment.get(name, "") for name in VARIABLES]
    if not all(found) or not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        values = " ".join(f"{name}={value}" for name, value in zip(VARIABLES, found, strict=True) if value)
        raise UserError(
            f"expected {', '.join(VARIABLES)} in the environment of each rank, as torchrun sets them, RANK below "
            f"WORLD_SIZE; found {values or 'none of them'}. To work alone: --no-distributed"
        )
    return int(rank), int(size)


def note(wanted: bool | None, environment: Mapping[str, str]) -> str:
    """A warning for a process that works alone, if variables indicate several ranks; else empty."""
    for rank, size in OTHERS if wanted is None and TORCHRUN not in environment else ():
        if environment.get(rank) and environment.get(size, "1") not in ("", "1"):
            return (
                f"{rank}={environment[rank]} and {size}={environment[size]} are set, but not by torchrun: this process "
                f"does all of the work; --distributed makes it one of {environment[size]} ranks that share it"
            )
    return ""


@contextlib.contextmanager
def joined(wanted: bool | None, warn: Callable[[str], object]) -> Iterator[Ranks]:
    """The ranks of this command, after all have joined. Imports torch only for several ranks.

    Raises:
        UserError: variables are wrong, torch is not installed, or ranks are missing after `START`.
    """
    rank, size = place(wanted, os.environ)
    if size == 1:
        if text := note(wanted, os.environ):
            warn(text)
        yield Ranks()
        return
    try:
        from torch import distributed
    except ModuleNotFoundError:
        raise UserError("several ranks need torch, which is not installed: pip install torch") from None
    at = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        with _stdout_to_stderr():
            distributed.init_process_group("gloo", timeout=START)
            places: list[Any] = [None] * size
            distributed.all_gather_object(places, (os.uname().nodename, os.sched_getaffinity(0)))
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"rank {rank} of {size} cannot join the others at {at}, for which it waits {START}: {error}"
        ) from None
    try:
        yield _with_processors(rank, places)
    finally:
        distributed.destroy_process_group()


def _with_processors(rank: int, places: list[tuple[str, set[int]]]) -> Ranks:
    """Divide the processors of a host that its ranks may use among these ranks."""
    hosts = [host for host, _ in places]
    own = set().union(*(usable for host, usable in places if host == hosts[rank]))
    return Ranks(rank, len(places), max(1, len(own) // hosts.count(hosts[rank])), tuple(hosts))


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect standard output, which may be JSON: some releases of Gloo print a line when they connect."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
