"""resume with another learning rate and the override

Uses a torch optimizer: since 0.19.0 Megatron's raises an error first, see resume_param_groups.
"""

from pathlib import Path

from trainers import megatron_training as mt
from trainers import show

SAVED, OWN = 1e-3, 5e-4


def run(folder: Path) -> str:
    saved, resumed = mt.scheduler(SAVED), mt.scheduler(OWN, override=True)
    saved.step(increment=4)
    resumed.optimizer.load_state_dict(saved.optimizer.state_dict())
    resumed.load_state_dict(saved.state_dict())
    resumed.step(increment=4)
    (rate,) = {group["lr"] for group in resumed.optimizer.param_groups}
    return "" if rate == OWN else f"the learning rate is {rate}, not {OWN}, and no error"


if __name__ == "__main__":
    show(run, f"the learning rate is {OWN}")
