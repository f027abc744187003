"""async_dead_worker: if the worker of an asynchronous save dies, the next step raises an error on all ranks."""

from pathlib import Path

from upstream import affected, shown, with_fix, without_fix

RELEASES = affected("async_dead_worker")


@without_fix(RELEASES)
def test_no_rank_is_told_of_the_dead_worker(version: str, delivery: str) -> None:
    assert "ranks raised no error in" in shown(__file__, version, delivery)


@with_fix(RELEASES)
def test_all_ranks_raise_an_error_at_the_next_step(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


# What the ranks run


def bug(folder: Path) -> str:
    from trainers import dead_worker
    from trainers import megatron_training as mt

    return dead_worker.summary(mt.results(told, dead_worker.RANKS))


def told(rank: int) -> str:
    from megatron.core.dist_checkpointing.strategies.async_utils import (
        AsyncCallsQueue,
        AsyncRequest,
    )

    from trainers import dead_worker

    return dead_worker.told(rank, AsyncCallsQueue(persistent=True), AsyncRequest)
