"""universal load at ZeRO-3 with a larger vocabulary"""

from pathlib import Path

import torch

from trainers import deepspeed_training as dt

RANKS, CASE, LARGER = 2, "stage3-1", 9


def save_and_load(rank: int, folder: Path) -> str:
    run = dt.engine_of(CASE, RANKS, universal=False, seed=0)
    dt.train(run, rank, RANKS, first=0)
    dt.save(run, folder)
    saved = dt.snapshot(run)
    dt.convert(folder)
    dt.Tiny = Larger  # type: ignore[misc]
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


class Larger(dt.Tiny):
    """The model with a larger first parameter, like an embedding with a larger vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(LARGER))


if __name__ == "__main__":
    dt.show_result(save_and_load, RANKS, "refused, with the parameter's name and sizes")
