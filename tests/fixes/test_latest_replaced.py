"""latest_replaced: a new `latest` file takes the name at once."""

import os
from pathlib import Path

from trainers.lazy import dt
from upstream import proof

test_latest_is_emptied_and_written_anew, test_another_file_takes_the_name_at_once = proof(
    __file__, "a crash leaves it without a name"
)


# What the ranks run

RANKS = 2
FIRST, SECOND = "first", "second"


def bug(folder: Path) -> str:
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
