"""universal load into a run with other settings"""

from pathlib import Path

from ckpt_patches.demo import deepspeed_training as dt

CASE, RANKS = "stage1-2", 2


def load_universal(rank: int, folder: Path) -> str:
    saved, _ = dt.train_and_save(rank, folder, CASE, RANKS)
    dt.convert(folder)
    resumed = dt.engine_of(CASE, RANKS, universal=True, seed=1, weight_decay=0.2, betas=(0.5, 0.6))
    dt.train(resumed, rank, RANKS, first=0)  # else the load fails: universal_all_moments
    dt.load(resumed, folder, dt.UNIVERSAL)
    different = dt.differences(dt.snapshot(resumed), saved)
    wrong = sum(name.startswith("group ") for name in different)
    return f"{wrong} of 2 param groups go on with other settings, and no error" if wrong else ""


if __name__ == "__main__":
    dt.allow_pickles()
    dt.show_result(load_universal, RANKS, "each param group goes on with the settings that were saved")
