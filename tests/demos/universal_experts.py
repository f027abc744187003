"""universal load of experts"""

from pathlib import Path
from typing import Any

from trainers import deepspeed_training as dt
from trainers import experts_training as experts
from trainers import show

EXPERT_PARALLEL = 2


def run(folder: Path) -> str:
    different = sum(dt.results(save_and_load, experts.RANKS, folder))
    return f"{different} states differ, and no error" if different else ""


def save_and_load(rank: int, folder: Path) -> int:
    run = experts.engine(EXPERT_PARALLEL, 1, universal=False)
    experts.train(run, rank, range(experts.STEPS))
    run.save_checkpoint(str(folder), tag=dt.TAG)
    saved = states(run)
    dt.convert(folder)
    resumed = experts.engine(EXPERT_PARALLEL, 1, universal=True)
    resumed.load_checkpoint(str(folder), tag=dt.UNIVERSAL)
    return len(dt.differences(states(resumed), saved))


def states(run: Any) -> dict[str, Any]:
    by_name = experts.state(run, EXPERT_PARALLEL).items()
    return {f"{name}.{key}": value for name, own in by_name for key, value in own.items()}


if __name__ == "__main__":
    show(run, "loaded bit for bit", raises="FileNotFoundError")
