# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import pytest
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

STATES = {"exp_avg", "exp_avg_sq"}


@pytest.fixture
def one_rank(monkeypatch):
    monkeypatch.setattr(stage_1_and_2.dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(stage_1_and_2.dist, "get_world_size", lambda group=None: 1)


def _optimizer(cls):
    """What these optimizers have of two parameter groups, on the only rank, when they are set up."""
    optimizer = cls.__new__(cls)
    lp_groups = [
        [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))],
        [torch.nn.Parameter(torch.ones(3))],
    ]
    flat_groups = [torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(3))]
    optimizer.optimizer = torch.optim.Adam([{"params": [flat]} for flat in flat_groups])
    optimizer.dp_process_group, optimizer.real_dp_process_group = None, [None, None]
    optimizer.bit16_groups = optimizer.bf16_groups = lp_groups
    optimizer.bit16_groups_flat = optimizer.bf16_groups_flat = flat_groups
    optimizer.single_partition_of_fp32_groups = optimizer.fp32_groups_flat_partition = flat_groups
    optimizer.averaged_gradients = optimizer.offload_gradient_dict = optimizer.fp32_groups_gradient_dict = {}
    optimizer.round_robin_bit16_padding = [[0], [0]]
    optimizer.cpu_offload = optimizer.zenflow = False
    optimizer.torch_autocast_gradscaler = None
    optimizer._link_all_hp_params()
    optimizer._hp_optimizer_states_linked = False
    return optimizer


def _step(optimizer):
    for flat in optimizer.single_partition_of_fp32_groups:
        flat.grad = torch.ones_like(flat)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        for group_no in range(len(optimizer.bit16_groups)):
            optimizer._optimizer_step(group_no)
    else:
        optimizer.optimizer.step()
        optimizer._lazy_init_hp_params_optimizer_state()


def _linked_states(optimizer):
    return [set(lp._hp_mapping.optim_fragment or ()) for group in optimizer.bit16_groups for lp in group]


def test_every_group_is_linked_after_a_step(one_rank):
    optimizer = _optimizer(DeepSpeedZeroOptimizer)
    _step(optimizer)
    assert _linked_states(optimizer) == [STATES] * 3
    state = optimizer.optimizer.state[optimizer.single_partition_of_fp32_groups[1]]
    (lp, ) = optimizer.bit16_groups[1]
    assert lp._hp_mapping.get_hp_fragment("exp_avg").data_ptr() == state["exp_avg"].data_ptr()


@pytest.mark.parametrize("cls", [DeepSpeedZeroOptimizer, BF16_Optimizer])
def test_links_are_made_again_after_a_checkpoint_is_loaded(cls, one_rank):
    optimizer = _optimizer(cls)
    _step(optimizer)
    optimizer._link_all_hp_params()  # as a load does
    _step(optimizer)
    assert _linked_states(optimizer) == [STATES] * 3
