"""read fp32 parameters after a universal load"""

from pathlib import Path

from deepspeed.utils import safe_get_full_fp32_param

from ckpt_patches.demo import deepspeed_training as dt
from ckpt_patches.demo import show

CASE, RANKS = "stage1-2", 2


def run(folder: Path) -> str:
    wrong, of = dt.results(load_and_ask, RANKS, folder)[0]
    return f"another state for {wrong} of {of} parameters, and no error" if wrong else ""


def load_and_ask(rank: int, folder: Path) -> tuple[int, int]:
    dt.train_and_save(rank, folder, CASE, RANKS)
    dt.convert(folder)
    resumed = dt.engine_of(CASE, RANKS, universal=True, seed=1)
    dt.load(resumed, folder, dt.UNIVERSAL)
    live, parameters = dt.state(resumed), dict(resumed.module.named_parameters())
    found = {name: safe_get_full_fp32_param(parameter) for name, parameter in parameters.items()}
    return sum(not found[name].equal(live[name]["fp32"]) for name in found), len(found)


if __name__ == "__main__":
    show(run, "the fp32 parameters that were loaded")
