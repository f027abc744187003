"""The ranks of one command, on one or several hosts: `torch.distributed` over Gloo, set up by a launcher.

All ranks take the same steps in the same order. Each step ends with an exchange of results and errors. After an error
of any rank, all ranks stop and rank 0 reports it. Detecting dead hosts and restarting is the launcher's task.
"""

import contextlib
import hashlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from ckpt_patches.errors import UserError, one_line

START = timedelta(minutes=10)  # timeout for all ranks to start; also for an exchange, after its barrier
STEP = timedelta(hours=6)  # how long ranks wait for the last one at the end of a step
MOST_WORKERS = 16  # of one rank, unless --workers sets another number
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks of a command. The default is a single rank, which needs no torch."""

    rank: int = 0
    size: int = 1

    @property
    def workers(self) -> int:
        """The number of worker processes of this rank: under torchrun, its share of the host's processors."""
        beside = os.environ.get("LOCAL_WORLD_SIZE", "") if self.size > 1 else ""
        share = len(os.sched_getaffinity(0)) // max(1, int(beside if beside.isdecimal() else 1))
        return max(1, min(MOST_WORKERS, share))

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """Every n-th of the items, which are the same on all ranks."""
        return items[self.rank :: self.size]

    def gather(self, step: str, work: Callable[[], Result]) -> list[Result]:
        """Run `work` on every rank. Returns on rank 0 all results, by rank; on other ranks only their own.

        Raises:
            Exception: the error of `work`, on rank 0 or for a single rank.
            UserError: a rank failed: on rank 0 with its message, and on all with the status of rank 0's error; or a
                rank is missing.
        """
        if self.size == 1:
            return [work()]
        from torch import distributed

        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        found: list[Any] = [None] * self.size if self.rank == 0 else []
        with self._loss_named(step):
            distributed.monitored_barrier(timeout=STEP)
            distributed.gather_object((result if self.rank else None, _message_of(error)), found or None)
            failed = next((rank for rank, (_, message) in enumerate(found) if message), None)
            failed, status = _broadcast((failed, getattr(error, "status", UserError.status)))  # rank 0's is for all
        if failed is None:
            return [result, *(own for own, _ in found[1:])]
        if self.rank == 0:
            raise error or UserError(f"rank {failed} of {self.size}: {found[failed][1]}")
        elsewhere = UserError(f"rank {failed} of {self.size} failed at {step}; rank 0 has the reason" if status else "")
        elsewhere.status = status
        raise elsewhere

    def first(self, step: str, work: Callable[[], Result]) -> Result:
        """Run `work` on rank 0, and return its result on all ranks. Raises as `gather`."""
        found = self.gather(step, work if self.rank == 0 else lambda: None)[0]
        if self.size > 1:
            with self._loss_named(step):
                found = _broadcast(found)
        return found  # type: ignore[return-value]  # rank 0's

    def spread(
        self, step: str, items: Sequence[Item], work: Callable[[Sequence[Item]], Iterable[Result]]
    ) -> list[Result]:
        """The results for all items, on all ranks; each rank works on its share of them. Raises as `gather`."""
        of_items = hashlib.sha256(repr(items).encode()).hexdigest()
        found = self.gather(step, lambda: (of_items, list(work(self.share(items)))))

        def in_order() -> list[Result]:
            if any(own != of_items for own, _ in found):
                raise UserError(f"expected the same files on all ranks, found others on a rank at {step}")
            return [found[n % self.size][1][n // self.size] for n in range(len(items))]

        return self.first(step, in_order)

    @contextlib.contextmanager
    def _loss_named(self, step: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            late = re.search(r"Rank (\d+) failed to pass", str(error))  # the barrier's message, on rank 0
            lost = f"rank {late[1]} of {self.size}" if late else f"one of the {self.size} ranks"
            raise UserError(
                f"{lost} is missing at the end of {step}: it was killed, or hung for {STEP}; see what it printed, and "
                "run the same command again"
            ) from None


def _broadcast(value: Any) -> Any:
    """Rank 0's value."""
    from torch import distributed

    values = [value]
    distributed.broadcast_object_list(values, src=0)
    return values[0]


def _message_of(error: Exception | None) -> str:
    """One line for a user's mistake; the traceback for a defect."""
    if error is None or isinstance(error, UserError | OSError):
        return "" if error is None else one_line(error) or type(error).__name__
    return f"a defect, please report it with what follows:\n{''.join(traceback.format_exception(error)).rstrip()}"


def place(wanted: bool | None, environment: Mapping[str, str]) -> tuple[int, int]:
    """This process's rank and the number of ranks: 0 and 1, unless under torchrun or `wanted` (--distributed).

    Raises:
        UserError: variables are missing, or wrong.
    """
    if not ("TORCHELASTIC_RUN_ID" in environment if wanted is None else wanted):
        return 0, 1
    rank, size, *_ = found = [environment.get(name, "") for name in VARIABLES]
    if not all(found) or not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        values = " ".join(f"{name}={value}" for name, value in zip(VARIABLES, found, strict=True) if value)
        raise UserError(
            f"expected {', '.join(VARIABLES)} in the environment of each rank, as torchrun sets them, RANK below "
            f"WORLD_SIZE; found {values or 'none of them'}. To work alone: --no-distributed"
        )
    return int(rank), int(size)


@contextlib.contextmanager
def joined(wanted: bool | None) -> Iterator[Ranks]:
    """The ranks of this command, after all have joined. Imports torch only for several ranks.

    Raises:
        UserError: variables are wrong, torch is not installed, or ranks are missing after `START`.
    """
    rank, size = place(wanted, os.environ)
    if size == 1:
        yield Ranks()
        return
    try:
        from torch import distributed
    except ModuleNotFoundError:
        raise UserError("several ranks need torch, which is not installed: pip install torch") from None
    sys.stdout.flush()
    stdout = os.dup(1)  # which may be JSON: some releases of Gloo print a line when they connect
    try:
        os.dup2(2, 1)
        distributed.init_process_group("gloo", timeout=START)
    except (RuntimeError, ValueError) as error:
        at = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(
            f"rank {rank} of {size} cannot join the others at {at}, for which it waits {START}: {error}"
        ) from None
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
    try:
        yield Ranks(rank, size)
    finally:
        distributed.destroy_process_group()
