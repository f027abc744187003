# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest
import torch

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

# A router's bias in fp32 lies between two bf16 parameters.
DTYPES = {"first": torch.bfloat16, "router_bias": torch.float32, "last": torch.bfloat16}
SIZES = {"first": 4, "router_bias": 3, "last": 5}


@pytest.fixture
def params():
    values = {name: torch.rand(SIZES[name]).to(dtype) for name, dtype in DTYPES.items()}
    return {name: torch.nn.Parameter(value) for name, value in values.items()}


@pytest.fixture
def optimizer(params):
    """As its constructor makes it, with states."""
    copies = {
        name: torch.nn.Parameter(param.detach().float())
        for name, param in params.items()
        if param.dtype != torch.float32
    }
    inner = torch.optim.Adam([copies.get(name, param) for name, param in params.items()])
    for param in inner.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    inner.step()
    made = Float16OptimizerWithFloat16Params.__new__(Float16OptimizerWithFloat16Params)
    vars(made).update(
        optimizer=inner,
        config=SimpleNamespace(),
        grad_scaler=None,
        is_stub_optimizer=False,
        float16_groups=[[params["first"], params["last"]]],
        fp32_from_float16_groups=[[copies["first"], copies["last"]]],
        fp32_from_fp32_groups=[[params["router_bias"]]],
    )
    return made


def test_each_param_has_its_own_states(optimizer, params):
    model_state_dict = {
        name: ShardedTensor.from_rank_offsets(name, param) for name, param in params.items()
    }
    state_dict = optimizer.sharded_state_dict(model_state_dict)
    copies = [tensor.key for tensor in state_dict["fp32_from_fp16_params"][0]]
    assert copies == ["optimizer.state.fp32_param.first", "optimizer.state.fp32_param.last"]
    states = [state["exp_avg"] for state in list(state_dict["optimizer"]["state"].values())[:3]]
    assert [state.key for state in states] == [f"optimizer.state.exp_avg.{name}" for name in DTYPES]
    assert [state.data.numel() for state in states] == list(SIZES.values())
