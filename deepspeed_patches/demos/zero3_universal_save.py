"""save after a universal load at ZeRO-3, then resume"""

from pathlib import Path

from ckpt_patches.demo import deepspeed_training as dt
from ckpt_patches.demo import show

CASE, RANKS = "stage3-1", 2


def run(folder: Path) -> str:
    different = dt.results(save_again, RANKS, folder)[0]
    return f"{different} states differ, and no error" if different else ""


def save_again(rank: int, folder: Path) -> int:
    dt.train_and_save(rank, folder, CASE, RANKS)
    dt.convert(folder)
    resumed = dt.engine_of(CASE, RANKS, universal=True, seed=1)
    dt.load(resumed, folder, dt.UNIVERSAL)
    dt.train(resumed, rank, RANKS, first=dt.STEPS)
    dt.save(resumed, folder / "again")
    saved = dt.snapshot(resumed)
    last = dt.engine_of(CASE, RANKS, universal=False, seed=2)
    try:
        dt.load(last, folder / "again", dt.TAG)
    except AssertionError as error:
        raise AssertionError("no model states of this rank in the checkpoint") from error
    return len(dt.on_any_rank(dt.differences(dt.snapshot(last), saved)))


if __name__ == "__main__":
    show(run, "saved; resumes bit for bit", raises="AssertionError")
