"""roll back to a checkpoint at step 4

Uses a torch optimizer.
"""

from pathlib import Path
from typing import Any

import torch

from ckpt_patches.demo import megatron_training as mt  # noqa: F401  the scheduler's imports need a GPU
from ckpt_patches.demo import show


def run(folder: Path) -> str:
    scheduler = started()
    scheduler.step(increment=4)
    saved = scheduler.state_dict()
    scheduler.step(increment=6)
    scheduler.load_state_dict(saved)
    steps = scheduler.num_steps
    return "" if steps == 4 else f"the schedule goes on at step {steps}, and no error"


def started() -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    group = {
        "params": [torch.nn.Parameter(torch.ones(4))],
        "max_lr": 1e-3,
        "min_lr": 0.0,
        "wd_mult": 1.0,
    }
    return OptimizerParamScheduler(
        torch.optim.AdamW([group]),
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=80,
        lr_decay_style="linear",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=80,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=False,
    )


if __name__ == "__main__":
    show(run, "the schedule goes on at step 4")
