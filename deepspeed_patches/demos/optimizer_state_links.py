"""read the moments of all param groups"""

from pathlib import Path

from deepspeed.utils import safe_get_full_optimizer_state

from ckpt_patches.demo import deepspeed_training as dt
from ckpt_patches.demo import show

RANKS = 2


def run(folder: Path) -> str:
    wrong = dt.results(train_and_ask, RANKS)[0]
    return f"other moments for {wrong} parameters, and no error" if wrong else ""


def train_and_ask(rank: int) -> int:
    run = dt.engine_of("stage1-2", RANKS, universal=False, seed=0)
    dt.train(run, rank, RANKS, first=0)
    live, parameters = dt.state(run), dict(run.module.named_parameters())
    found = {name: safe_get_full_optimizer_state(parameter, "exp_avg") for name, parameter in parameters.items()}
    return sum(not found[name].equal(live[name]["exp_avg"]) for name in found)


if __name__ == "__main__":
    show(run, "the moments of all parameters", raises="ValueError: exp_avg not found in optimizer state fragment")
