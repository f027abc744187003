"""zero3_universal_sizes: a universal load at ZeRO-3 into parameters of other sizes is refused."""

from pathlib import Path
from typing import Any

import torch

from trainers.lazy import dt
from upstream import proof

test_main_parameters_of_all_others_are_wrong, test_it_is_refused_with_the_name_and_the_sizes = proof(
    __file__, "masters of parameters whose size is the same differ, and no error"
)


# What the ranks run

RANKS, CASE, LARGER = 2, "stage3-1", 9


def save_and_load(rank: int, folder: Path) -> str:
    run = dt.engine_of(CASE, RANKS, universal=False, seed=0)
    dt.train(run, rank, RANKS, first=0)
    dt.save(run, folder)
    saved = dt.snapshot(run)
    dt.convert(folder)
    dt.Tiny = larger(dt.Tiny)  # type: ignore[misc]
    resumed = dt.engine_of(CASE, RANKS, universal=True, seed=1)
    try:
        dt.load(resumed, folder, dt.UNIVERSAL)
    except ValueError as error:
        if "another size" in str(error):
            return ""
        raise
    found = dt.snapshot(resumed)
    masters = [name for name in saved if name.endswith(".fp32") and not name.startswith("scale")]
    wrong = sum(not dt.same(found[name], saved[name]) for name in masters)
    return f"{wrong} masters of parameters whose size is the same differ, and no error" if wrong else ""


def larger(model: Any) -> Any:
    """The model with a larger first parameter, like an embedding with a larger vocabulary."""

    class Larger(model):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(LARGER))

    return Larger


def bug(folder: Path) -> str:
    return str(dt.results(save_and_load, RANKS, folder)[0])
