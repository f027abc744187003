"""kill the worker of an asynchronous save"""

from pathlib import Path

from trainers import dead_worker, show
from trainers import megatron_training as mt


def run(folder: Path) -> str:
    return dead_worker.summary(mt.results(told, dead_worker.RANKS))


def told(rank: int) -> str:
    from megatron.core.dist_checkpointing.strategies.async_utils import (
        AsyncCallsQueue,
        AsyncRequest,
    )

    return dead_worker.told(rank, AsyncCallsQueue(persistent=True), AsyncRequest)


if __name__ == "__main__":
    show(run, "all ranks raised an error at the next step")
