# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import pytest
import torch
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

NAMES = ("decay_a", "decay_b", "no_decay")
GROUP_OF = (0, 0, 1)  # the first group is cut in two sub-groups
STEPS = 3


def _groups(count):
    return [{"params": [torch.nn.Parameter(torch.zeros(1))], "weight_decay": 0.1 / (n + 1)} for n in range(count)]


def _write_checkpoint(folder, step, groups):
    states = {"step": step, "exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4)}
    settings = torch.optim.AdamW(_groups(groups), lr=0.5).state_dict()["param_groups"]
    for index, name in enumerate(NAMES):
        (folder / "zero" / name).mkdir(parents=True)
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            torch.save(torch.full((4, ), float(index + 1)), folder / "zero" / name / f"{key}.pt")
    optim_sd = {"optimizer_state_dict": {"state": {0: states}, "param_groups": settings}}
    torch.save(optim_sd, folder / "zero" / "optimizer_state.pt")


@pytest.fixture
def optimizer(monkeypatch):
    """Stage 3 of a single rank, as far as a universal load looks at it."""
    monkeypatch.setattr(stage3.dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(stage3.dist, "get_world_size", lambda group=None: 1)
    made = object.__new__(DeepSpeedZeroOptimizer_Stage3)
    params = [torch.nn.Parameter(torch.zeros(4)) for _ in NAMES]
    made.optimizer = torch.optim.AdamW(_groups(2), lr=0.1)
    for group in made.optimizer.param_groups:
        group.update(params=[], weight_decay=0.0)
    made.dp_process_group = None
    made._get_param_partition_group = lambda param: None
    made.param_names = {params[index]: name for index, name in enumerate(NAMES)}
    made.fp16_groups = [[param] for param in params]
    made.fp16_partitioned_groups = [[param.data] for param in params]
    made.fp16_partitioned_groups_flat = [param.data for param in params]
    made.fp32_partitioned_groups_flat = [torch.zeros(4, requires_grad=True) for _ in params]
    made.unflatten = lambda flat, tensors: [flat]
    made.swap_optimizer = False
    made.custom_loss_scaler = made.external_loss_scale = None
    made.loss_scaler, made.dynamic_loss_scale, made.overflow = None, False, False
    return made


def _load(optimizer, folder):
    optimizer.load_hp_checkpoint_state_from_checkpoint_dir_stage3(str(folder))


def _step(optimizer):
    """One sub-group after the other, as stage 3 does it."""
    for index, group in enumerate(GROUP_OF):
        flat = optimizer.fp32_partitioned_groups_flat[index]
        flat.grad = torch.ones(4)
        optimizer.optimizer.param_groups[group]["params"] = [flat]
        optimizer.optimizer.step()
        optimizer.optimizer.param_groups[group]["params"] = []


def test_each_group_gets_its_own_settings(optimizer, tmp_path):
    _write_checkpoint(tmp_path, torch.tensor(2.0), groups=2)

    _load(optimizer, tmp_path)

    groups = optimizer.optimizer.param_groups
    assert [(group["weight_decay"], group["lr"], group["params"]) for group in groups] == [
        (0.1, 0.5, []),
        (0.05, 0.5, []),
    ]


def test_each_sub_group_counts_its_own_steps(optimizer, tmp_path):
    _write_checkpoint(tmp_path, torch.tensor(2.0), groups=2)

    _load(optimizer, tmp_path)
    for _ in range(STEPS):
        _step(optimizer)

    state = optimizer.optimizer.state
    assert [state[flat]["step"].item()
            for flat in optimizer.fp32_partitioned_groups_flat] == [2.0 + STEPS] * len(NAMES)


def test_a_step_that_is_a_number_stays_one(optimizer, tmp_path):
    _write_checkpoint(tmp_path, 2, groups=2)

    _load(optimizer, tmp_path)

    steps = [optimizer.optimizer.state[flat]["step"] for flat in optimizer.fp32_partitioned_groups_flat]
    assert steps == [2, 2, 2]
    assert all(type(step) is int for step in steps)


def test_groups_that_are_not_those_of_the_checkpoint_are_refused(optimizer, tmp_path):
    _write_checkpoint(tmp_path, torch.tensor(2.0), groups=1)

    with pytest.raises(ValueError, match="expected 1 param groups"):
        _load(optimizer, tmp_path)
