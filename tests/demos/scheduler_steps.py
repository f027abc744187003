"""roll back to a checkpoint at step 4

Uses a torch optimizer.
"""

from pathlib import Path

from trainers import megatron_training as mt
from trainers import show


def run(folder: Path) -> str:
    scheduler = mt.scheduler(1e-3, style="linear")
    scheduler.step(increment=4)
    saved = scheduler.state_dict()
    scheduler.step(increment=6)
    scheduler.load_state_dict(saved)
    steps = scheduler.num_steps
    return "" if steps == 4 else f"the schedule goes on at step {steps}, and no error"


if __name__ == "__main__":
    show(run, "the schedule goes on at step 4")
