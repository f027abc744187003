"""universal_group_count: a universal load into another number of param groups is refused."""

from pathlib import Path

from trainers.lazy import dt
from upstream import proof

test_it_is_loaded_without_an_error_or_with_another_one, test_an_error_names_both_numbers = proof(
    __file__, "2 param groups loaded into"
)


# What the ranks run

RANKS = (2, 3)
SAVED, OTHERS = "stage1-2", ("stage1-1", "stage2-3")


def bug(folder: Path) -> str:
    dt.allow_pickles()
    found = [line for ranks in RANKS for line in dt.results(load_into_others, ranks, folder / str(ranks), ranks)[0]]
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
