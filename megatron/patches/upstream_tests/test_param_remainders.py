# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest
import torch

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range

OWNED = Range(4, 12)  # of a parameter with 16 elements


class Optimizer:
    """As Transformer Engine's FusedAdam, of which a main parameter is set."""

    def __init__(self, param, store_param_remainders):
        self.param_groups = [{"params": [param]}]
        self.store_param_remainders = store_param_remainders
        self.main_param = None

    def set_scaled_state(self, param, name, value):
        assert value.dtype == (torch.int16 if self.store_param_remainders else torch.float32)
        self.main_param = value


@pytest.fixture
def main_param():
    return torch.randn(OWNED.size, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def remainders(main_param):
    return main_param.view(torch.int32).to(torch.int16)  # the lower half


def load(main_param, saved, store_param_remainders):
    """What the optimizer has after a load, beside the bf16 weights of that main parameter."""
    weights = torch.zeros(16, dtype=torch.bfloat16)
    weights[OWNED.start : OWNED.end] = main_param.bfloat16()
    model_param = torch.nn.Parameter(weights)
    shard = weights[OWNED.start : OWNED.end]
    own = DistributedOptimizer.__new__(DistributedOptimizer)
    own.optimizer = Optimizer(shard, store_param_remainders)
    own.config = SimpleNamespace(
        use_precision_aware_optimizer=True,
        use_precision_aware_optimizer_no_fp8_or_ds_fp8=True,
        store_param_remainders=store_param_remainders,
    )
    own.ddp_config = SimpleNamespace(use_custom_fsdp=False, use_megatron_fsdp=False)
    own.model_param_group_index_map = {model_param: (0, 0)}
    own._get_model_param_range_map = lambda param: {"param": OWNED}
    own._set_main_param_and_optimizer_states(model_param, {"param": saved})
    return own.optimizer.main_param


def test_remainders_that_were_gathered_in_fp32(main_param, remainders):
    loaded = load(main_param, remainders.float(), store_param_remainders=True)
    assert torch.equal(loaded, remainders)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
def test_remainders_in_a_run_that_keeps_main_params(main_param, remainders, dtype):
    loaded = load(main_param, remainders.to(dtype), store_param_remainders=False)
    assert torch.equal(loaded, main_param)


def test_main_params_in_a_run_that_keeps_remainders(main_param):
    with pytest.raises(ValueError, match="store_param_remainders=False"):
        load(main_param, main_param, store_param_remainders=True)
