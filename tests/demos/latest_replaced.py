"""read the old `latest` file after the next save"""

import os
from pathlib import Path

from trainers import deepspeed_training as dt
from trainers import show

RANKS = 2
FIRST, SECOND = "first", "second"


def run(folder: Path) -> str:
    kept = folder / "kept"
    dt.results(save_twice, RANKS, folder, kept)
    assert (folder / "latest").read_text() == SECOND
    return "" if kept.read_text() == FIRST else "`latest` is emptied and written anew: a crash leaves it without a name"


def save_twice(rank: int, folder: Path, kept: Path) -> None:
    """Save twice; between the saves, hard-link `latest` to `kept`."""
    run = dt.engine_of("stage1-2", RANKS, universal=False, seed=0)
    dt.train(run, rank, RANKS, first=0)
    run.save_checkpoint(str(folder), tag=FIRST)
    if rank == 0:
        os.link(folder / "latest", kept)
    run.save_checkpoint(str(folder), tag=SECOND)


if __name__ == "__main__":
    show(run, "another file takes the name `latest` at once")
