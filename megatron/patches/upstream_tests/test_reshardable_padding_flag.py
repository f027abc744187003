# Copyright (c) 2025, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest
import torch

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range

NUMEL = 6
DTYPE = (torch.bfloat16, torch.float32)
STATES = ("master_param", "exp_avg", "exp_avg_sq")


class PrecisionAwareAdam:
    """Keeps what it is given; like Transformer Engine's FusedAdam, takes fp32 tensors alone."""

    def __init__(self, param):
        self.param_groups = [{"params": [param]}]
        self.state = {param: dict.fromkeys(STATES)}

    def set_scaled_state(self, param, state_name, unscaled_state):
        assert unscaled_state.dtype == torch.float32
        assert state_name in STATES
        self.state[param][state_name] = unscaled_state


@pytest.fixture
def optimizer():
    param = torch.nn.Parameter(torch.rand(NUMEL).bfloat16())
    whole = Range(0, NUMEL)
    ranges = dict.fromkeys(("gbuf_world", "gbuf_world_in_bucket", "gbuf_local", "param"), whole)
    optimizer = DistributedOptimizer.__new__(DistributedOptimizer)
    optimizer.optimizer = PrecisionAwareAdam(param)
    optimizer.model_param_group_index_map = {param: (0, 0)}
    optimizer.gbuf_ranges = [{DTYPE: [{"param_map": {param: ranges}}]}]
    optimizer.data_parallel_group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    bucket = SimpleNamespace(grad_data=torch.zeros(NUMEL), numel_unpadded=NUMEL)
    optimizer.buffers = [SimpleNamespace(buckets=[bucket])]
    optimizer.ddp_config = SimpleNamespace(use_custom_fsdp=False, use_megatron_fsdp=False)
    optimizer.config = SimpleNamespace(
        use_precision_aware_optimizer=True, use_precision_aware_optimizer_no_fp8_or_ds_fp8=True
    )
    return optimizer


def test_padding_flag_is_no_state(optimizer):
    saved = {key: torch.rand(NUMEL) for key in ("param", "exp_avg", "exp_avg_sq")}
    bucket = [{**saved, "padding": False}, {"exp_avg": torch.zeros(2), "padding": True}]
    load = getattr(optimizer, "load_parameter_state_from_dp_reshardable", None)
    if load is None:  # what the format was called before
        load = optimizer.load_parameter_state_from_fs_bucket_space
    load({0: {DTYPE: [bucket]}})

    (state,) = optimizer.optimizer.state.values()
    saved["master_param"] = saved.pop("param")
    assert state.keys() == saved.keys()
    assert all(torch.equal(state[key], saved[key]) for key in STATES)
