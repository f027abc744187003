# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

SAVED = {"max_lr": 1e-3, "min_lr": 1e-4}
OWN = {"max_lr": 5e-4, "min_lr": 5e-5}
DECOUPLED = {"max_lr": 1e-5, "min_lr": 1e-6}


def make_scheduler(*param_groups, bounds, **flags):
    optimizer = SimpleNamespace(param_groups=[dict(group) for group in param_groups])
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        **bounds,
        lr_warmup_steps=0,
        lr_decay_steps=10,
        lr_decay_style="linear",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=10,
        wd_incr_style="constant",
        **{
            "use_checkpoint_opt_param_scheduler": False,
            "override_opt_param_scheduler": False,
            **flags,
        },
    )
    return scheduler


def resume(scheduler, *saved_groups):
    """Load as Megatron-LM does, optimizer first; return the learning rates in the middle."""
    saved = make_scheduler(*saved_groups, bounds=SAVED)
    saved.step(increment=5)
    scheduler.optimizer.param_groups = [dict(group) for group in saved.optimizer.param_groups]
    scheduler.load_state_dict(saved.state_dict())
    return [group["lr"] for group in scheduler.optimizer.param_groups]


def test_override_takes_the_bounds_of_each_group_of_this_run():
    scheduler = make_scheduler(OWN, DECOUPLED, bounds=OWN, override_opt_param_scheduler=True)

    assert resume(scheduler, SAVED, SAVED) == pytest.approx([2.75e-4, 5.5e-6])
    scheduler.step(increment=10)
    assert [group["lr"] for group in scheduler.optimizer.param_groups] == [5e-5, 1e-6]


def test_override_holds_where_the_optimizer_is_told_something_else_afterwards():
    scheduler = make_scheduler(OWN, DECOUPLED, bounds=OWN, override_opt_param_scheduler=True)
    resume(scheduler, SAVED, SAVED)

    for group in scheduler.optimizer.param_groups:
        group.update(SAVED)
    scheduler.step(increment=0)

    assert [group["lr"] for group in scheduler.optimizer.param_groups] == pytest.approx(
        [2.75e-4, 5.5e-6]
    )


def test_bounds_that_are_changed_later_hold():
    scheduler = make_scheduler(OWN, bounds=OWN, override_opt_param_scheduler=True)
    resume(scheduler, SAVED)
    scheduler.step(increment=1)

    scheduler.optimizer.param_groups[0].update(DECOUPLED)
    scheduler.step(increment=10)

    assert scheduler.optimizer.param_groups[0]["lr"] == DECOUPLED["min_lr"]
