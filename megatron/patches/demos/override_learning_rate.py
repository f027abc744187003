"""resume with another learning rate and the override

Uses a torch optimizer: since 0.19.0 Megatron's raises an error first, see resume_param_groups.
"""

from pathlib import Path
from typing import Any

import torch

from ckpt_patches.demo import megatron_training as mt  # noqa: F401  the scheduler's imports need a GPU
from ckpt_patches.demo import show

SAVED, OWN = 1e-3, 5e-4


def run(folder: Path) -> str:
    optimizer, scheduler = started(SAVED, override=False)
    scheduler.step(increment=4)
    saved = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    resumed, of_resumed = started(OWN, override=True)
    resumed.load_state_dict(saved["optimizer"])
    of_resumed.load_state_dict(saved["scheduler"])
    of_resumed.step(increment=4)
    (rate,) = {group["lr"] for group in resumed.param_groups}
    return "" if rate == OWN else f"the learning rate is {rate}, not {OWN}, and no error"


def started(rate: float, *, override: bool) -> tuple[Any, Any]:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    group = {
        "params": [torch.nn.Parameter(torch.ones(4))],
        "max_lr": rate,
        "min_lr": rate,
        "wd_mult": 1.0,
    }
    optimizer = torch.optim.AdamW([group], lr=rate)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=rate,
        min_lr=rate,
        lr_warmup_steps=0,
        lr_decay_steps=80,
        lr_decay_style="constant",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=80,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=override,
    )
    return optimizer, scheduler


if __name__ == "__main__":
    show(run, f"the learning rate is {OWN}")
