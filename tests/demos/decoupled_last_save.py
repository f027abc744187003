"""read `latest` after the decoupled writer's last save"""

import os
from pathlib import Path

from trainers import deepspeed_training as dt
from trainers import show

RANKS = 2


def run(folder: Path) -> str:
    os.environ.update(CROSS_SIZE="1", CROSS_RANK="0")  # as set by the launcher: number of nodes, node rank
    dt.results(save_twice, RANKS, folder)
    there = sorted(path.name for path in (folder / "second").iterdir())
    named = (folder / "latest").read_text()
    return "" if named == "second" else f"`latest` names {named!r}; the {len(there)} files of 'second' are there"


def save_twice(rank: int, folder: Path) -> None:
    run = dt.engine_of("stage3_decoupled-1", RANKS, universal=False, seed=0)
    for step, tag in ((0, "first"), (dt.STEPS, "second")):
        dt.train(run, rank, RANKS, first=step)
        run.save_checkpoint(str(folder), tag=tag)
    run.destroy()


if __name__ == "__main__":
    show(run, "`latest` names the last save")
