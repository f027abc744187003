"""universal load with another number of param groups"""

from pathlib import Path

from trainers import cases, show
from trainers import deepspeed_training as dt

RANKS = (2, 3)
SAVED, OTHERS = "stage1-2", ("stage1-1", "stage2-3")


def run(folder: Path) -> str:
    found = [
        line for ranks in cases(RANKS) for line in dt.results(load_into_others, ranks, folder / str(ranks), ranks)[0]
    ]
    return "; ".join(dict.fromkeys(found))


def load_into_others(rank: int, folder: Path, ranks: int) -> list[str]:
    """The loads into other numbers of groups that do not raise the error."""
    dt.train_and_save(rank, folder, SAVED, ranks)
    dt.convert(folder)
    found = []
    for case in OTHERS:
        run = dt.engine_of(case, ranks, universal=True, seed=1)
        error = ""
        try:
            dt.load(run, folder, dt.UNIVERSAL)
        except ValueError as raised:
            error = str(raised)
        if not (error.startswith("expected 2 param groups") and f"found {case[-1]} in this run" in error):
            found.append(f"2 param groups loaded into {case[-1]}: {error or 'no error'}")
    return found


if __name__ == "__main__":
    dt.allow_pickles()
    show(run, "an error that names both numbers")
