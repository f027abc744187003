"""read the moments of all param groups"""

from pathlib import Path

from deepspeed.utils import safe_get_full_optimizer_state

from trainers import deepspeed_training as dt

RANKS = 2


def train_and_ask(rank: int, folder: Path) -> str:
    run = dt.engine_of("stage1-2", RANKS, universal=False, seed=0)
    dt.train(run, rank, RANKS, first=0)
    live, parameters = dt.state(run), dict(run.module.named_parameters())
    found = {name: safe_get_full_optimizer_state(parameter, "exp_avg") for name, parameter in parameters.items()}
    wrong = sum(not found[name].equal(live[name]["exp_avg"]) for name in found)
    return f"other moments for {wrong} parameters, and no error" if wrong else ""


if __name__ == "__main__":
    missing = "ValueError: exp_avg not found in optimizer state fragment"
    dt.show_result(train_and_ask, RANKS, "the moments of all parameters", raises=missing)
