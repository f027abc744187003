# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest
import torch

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


class Optimizer:
    """As Transformer Engine's FusedAdam, of which a main parameter is set."""

    def __init__(self, param, state):
        self.param_groups = [{"params": [param]}]
        self.state = {param: state}

    def set_scaled_state(self, param, name, value):
        self.state[param][name].copy_(value)


def reloaded(state, **arguments):
    param = torch.nn.Parameter(torch.full((4,), 0.75, dtype=torch.bfloat16))
    own = DistributedOptimizer.__new__(DistributedOptimizer)
    own.optimizer = Optimizer(param, state)
    own.is_stub_optimizer = False
    own.config = SimpleNamespace(
        use_precision_aware_optimizer=True, use_precision_aware_optimizer_no_fp8_or_ds_fp8=True
    )
    own.ddp_config = SimpleNamespace(use_custom_fsdp=False, use_megatron_fsdp=False)
    own._copy_model_params_to_main_params(**arguments)
    return own.optimizer.state[param]


def test_main_params_become_the_params():
    assert reloaded({"master_param": torch.ones(4)})["master_param"].eq(0.75).all()


def test_remainders_become_zero():
    state = reloaded({"master_param": torch.ones(4, dtype=torch.int16)})
    assert state["master_param"].eq(0).all()


def test_main_params_of_a_checkpoint_are_refused():
    copy = DistributedOptimizer._copy_model_params_to_main_params
    if "state_dict" not in copy.__code__.co_varnames:
        pytest.skip("this release loads none")
    with pytest.raises(ValueError, match="load_main_params_from_ckpt"):
        reloaded({}, state_dict={})
