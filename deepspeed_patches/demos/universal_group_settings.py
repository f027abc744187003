"""universal load into a run with other settings"""

from pathlib import Path

from ckpt_patches.demo import deepspeed_training as dt
from ckpt_patches.demo import show

CASE, RANKS = "stage1-2", 2


def run(folder: Path) -> str:
    dt.allow_pickles()
    wrong = dt.results(load_universal, RANKS, folder)[0]
    return f"{wrong} of 2 param groups go on with other settings, and no error" if wrong else ""


def load_universal(rank: int, folder: Path) -> int:
    saved, _ = dt.train_and_save(rank, folder, CASE, RANKS)
    dt.convert(folder)
    resumed = dt.engine_of(CASE, RANKS, universal=True, seed=1, weight_decay=0.2, betas=(0.5, 0.6))
    dt.train(resumed, rank, RANKS, first=0)  # else the load fails: universal_all_moments
    dt.load(resumed, folder, dt.UNIVERSAL)
    different = dt.differences(dt.snapshot(resumed), saved)
    return sum(name.startswith("group ") for name in different)


if __name__ == "__main__":
    show(run, "each param group goes on with the settings that were saved")
