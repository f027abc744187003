# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


def make_scheduler():
    optimizer = SimpleNamespace(param_groups=[{"max_lr": 1e-3, "min_lr": 0.0}])
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=10,
        lr_decay_style="linear",
        start_wd=0.1,
        end_wd=0.2,
        wd_incr_steps=10,
        wd_incr_style="linear",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=False,
    )


@pytest.mark.parametrize("steps", [0, 3, 9])
def test_a_load_replaces_the_steps_that_were_taken(steps):
    saved = make_scheduler()
    saved.step(increment=5)
    scheduler = make_scheduler()
    scheduler.step(increment=steps)

    for _ in range(2):  # a second load changes nothing
        scheduler.load_state_dict(saved.state_dict())

        assert scheduler.num_steps == 5
        (group,) = scheduler.optimizer.param_groups
        assert group["lr"] == pytest.approx(5e-4)
        assert group["weight_decay"] == pytest.approx(0.15)
