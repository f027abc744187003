"""async_dead_worker: if the worker of an asynchronous save dies, the next step raises an error on all ranks."""

from collections.abc import Sequence
from pathlib import Path

from trainers import dead_worker
from trainers.lazy import mt
from upstream import affected, shown, with_fix, without_fix

RELEASES = affected("async_dead_worker")


@without_fix(RELEASES)
def test_no_rank_is_told_of_the_dead_worker(version: str, delivery: str) -> None:
    found = shown(__file__, version, delivery)
    assert "writing: a worker was killed, and " in found
    assert "forked: a worker was killed, and " in found


@with_fix(RELEASES)
def test_all_ranks_raise_an_error_at_the_next_step(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""
    assert shown(__file__, version, delivery, "where_upstream_waits") == ""


# What the ranks run


def bug(folder: Path, ways: Sequence[str] = ("writing", "forked")) -> str:
    found = [dead_worker.summary(how, mt.results(told, dead_worker.RANKS, how)) for how in ways]
    return "; ".join(filter(None, found))


def where_upstream_waits(folder: Path) -> str:
    return bug(folder, dead_worker.WAITING)


def told(rank: int, how: str) -> str:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest

    return dead_worker.told(rank, AsyncCallsQueue(persistent=how != "forked"), AsyncRequest, how)
