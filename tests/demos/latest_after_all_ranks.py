"""kill a rank in the middle of a save"""

import contextlib
import os
import time
from pathlib import Path

from trainers import deepspeed_training as dt
from trainers import show
from trainers.ranks import RankError

RANKS = 2
LATE = 2.0  # seconds for the other rank to write all that it writes without this one
WHOLE, CUT = "first", "second"


def run(folder: Path) -> str:
    with contextlib.suppress(RankError):  # from the killed rank, or from the one that waits for it
        dt.results(save_twice, RANKS, folder)
    files = [len(list((folder / tag).glob("*_optim_states.pt"))) for tag in (WHOLE, CUT)]
    assert files == [2, 1], f"expected 2 files in {WHOLE} and 1 in {CUT}, found {files}"
    return "" if (folder / "latest").read_text() == WHOLE else "`latest` names a checkpoint without the files of rank 1"


def save_twice(rank: int, folder: Path) -> None:
    run = dt.engine_of("stage1-2", RANKS, universal=False, seed=0)
    dt.train(run, rank, RANKS, first=0)
    run.save_checkpoint(str(folder), tag=WHOLE)
    if rank == 1:
        run.checkpoint_engine.save = die
    run.save_checkpoint(str(folder), tag=CUT)


def die(state: object, path: str, *args: object, **keywords: object) -> None:
    while not list(Path(path).parent.glob("*_optim_states.pt")):  # the other rank's file
        time.sleep(0.05)
    time.sleep(LATE)
    os._exit(3)


if __name__ == "__main__":
    show(run, "`latest` names the checkpoint before it, which is complete")
