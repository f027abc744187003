"""read fp32 parameters after a universal load"""

from pathlib import Path

from deepspeed.utils import safe_get_full_fp32_param

from trainers import deepspeed_training as dt

CASE, RANKS = "stage1-2", 2


def load_and_ask(rank: int, folder: Path) -> str:
    dt.train_and_save(rank, folder, CASE, RANKS)
    dt.convert(folder)
    resumed = dt.engine_of(CASE, RANKS, universal=True, seed=1)
    dt.load(resumed, folder, dt.UNIVERSAL)
    live, parameters = dt.state(resumed), dict(resumed.module.named_parameters())
    found = {name: safe_get_full_fp32_param(parameter) for name, parameter in parameters.items()}
    wrong = sum(not found[name].equal(live[name]["fp32"]) for name in found)
    return f"another state for {wrong} of {len(found)} parameters, and no error" if wrong else ""


if __name__ == "__main__":
    dt.show_result(load_and_ask, RANKS, "the fp32 parameters that were loaded")
