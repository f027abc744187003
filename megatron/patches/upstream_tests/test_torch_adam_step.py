# Copyright (c) 2025, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest
import torch

from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range

SIZES = (6, 4, 5)
MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.fixture
def optimizer(monkeypatch):
    """A distributed optimizer around torch's AdamW, as far as a load looks at it."""
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    model_params = [torch.nn.Parameter(torch.rand(size)) for size in SIZES]
    main_params = [torch.nn.Parameter(param.detach().clone()) for param in model_params]
    param_map = {}
    for param in model_params:
        param_map[param] = {"gbuf_world": Range(0, param.numel()), "param": Range(0, param.numel())}

    # The groups of a checkpoint are found by these keys.
    group_keys = dict.fromkeys(getattr(distrib_optimizer, "param_group_identifier_keys", ()), 1.0)
    optimizer = DistributedOptimizer.__new__(DistributedOptimizer)
    optimizer.optimizer = torch.optim.AdamW([{"params": main_params, **group_keys}], lr=0.1)
    group_indices = {param: (0, order) for order, param in enumerate(model_params)}
    optimizer.model_param_group_index_map = group_indices
    optimizer.gbuf_ranges = [{(torch.float32, torch.float32): [{"param_map": param_map}]}]
    optimizer.ddp_config = SimpleNamespace(use_custom_fsdp=False, use_megatron_fsdp=False)
    optimizer.config = SimpleNamespace(
        optimizer="adam",
        fp16=False,
        use_precision_aware_optimizer=False,
        use_precision_aware_optimizer_no_fp8_or_ds_fp8=False,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
    )
    optimizer.grad_scaler = None
    return optimizer


def _step(optimizer):
    for param in optimizer.optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.optimizer.step()


def test_tensors_are_loaded_without_step(optimizer):
    _step(optimizer)
    keys = ("fp32_param", *MOMENTS)
    saved = {i: {key: torch.rand(size) for key in keys} for i, size in enumerate(SIZES)}
    with torch.no_grad():
        optimizer.load_parameter_state_from_fs_model_space(saved)

    for i, param in enumerate(optimizer.optimizer.param_groups[0]["params"]):
        state = optimizer.optimizer.state[param]
        assert torch.equal(param, saved[i]["fp32_param"])
        assert all(torch.equal(state[key], saved[i][key]) for key in MOMENTS)
        assert state["step"] == 1


def test_params_do_not_share_step(optimizer):
    _step(optimizer)
    state_dict = optimizer.state_dict()
    optimizer.optimizer.state.clear()
    optimizer.load_state_dict(state_dict)
    for param in optimizer.optimizer.param_groups[0]["params"]:
        for key in MOMENTS:
            optimizer.optimizer.state[param][key].zero_()  # allocated, and loaded later
    _step(optimizer)

    steps = [state["step"] for state in optimizer.optimizer.state.values()]
    assert len({id(step) for step in steps}) == len(SIZES)
    assert [step.item() for step in steps] == [2.0] * len(SIZES)
