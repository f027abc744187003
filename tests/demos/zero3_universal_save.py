"""save after a universal load at ZeRO-3, then resume"""

from pathlib import Path

from trainers import deepspeed_training as dt

CASE, RANKS = "stage3-1", 2


def save_again(rank: int, folder: Path) -> str:
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
    different = dt.on_any_rank(dt.differences(dt.snapshot(last), saved))
    return f"{len(different)} states differ, and no error" if different else ""


if __name__ == "__main__":
    dt.show_result(save_again, RANKS, "saved; resumes bit for bit", raises="AssertionError")
