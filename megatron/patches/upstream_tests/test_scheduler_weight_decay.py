# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


def make_scheduler(weight_decay, **flags):
    return OptimizerParamScheduler(
        SimpleNamespace(param_groups=[{"max_lr": 1e-3, "min_lr": 0.0}]),
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=10,
        lr_decay_style="linear",
        start_wd=weight_decay,
        end_wd=weight_decay,
        wd_incr_steps=10,
        wd_incr_style="constant",
        **{
            "use_checkpoint_opt_param_scheduler": False,
            "override_opt_param_scheduler": False,
            **flags,
        },
    )


@pytest.mark.parametrize(
    ("flag", "expected"),
    [("use_checkpoint_opt_param_scheduler", 0.1), ("override_opt_param_scheduler", 0.3)],
)
def test_the_weight_decay_after_a_load_is_that_of_the_next_steps(flag, expected):
    saved = make_scheduler(0.1)
    saved.step(increment=5)
    scheduler = make_scheduler(0.3, **{flag: True})

    scheduler.load_state_dict(saved.state_dict())

    (group,) = scheduler.optimizer.param_groups
    assert group["weight_decay"] == expected
    scheduler.step(increment=1)
    assert group["weight_decay"] == expected
