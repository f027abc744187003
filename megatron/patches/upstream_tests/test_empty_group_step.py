# Copyright (c) 2025, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest
import torch

from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range


class FusedAdam(torch.optim.AdamW):
    """AdamW with the step in the param groups that have parameters, as in Transformer Engine."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            if len(group["params"]) > 0:
                group["step"] = group.get("step", 0) + 1


@pytest.fixture
def optimizer(monkeypatch):
    """A distributed optimizer with a group that has no parameters on this rank."""
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True, raising=False)
    monkeypatch.setattr(distrib_optimizer, "USING_TE_OPTIMIZER", True, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    model_param = torch.nn.Parameter(torch.rand(6))
    main_param = torch.nn.Parameter(model_param.detach().clone())
    param_range = {"gbuf_world": Range(0, 6), "param": Range(0, 6)}

    # The groups of a checkpoint are found by these keys.
    keys = getattr(distrib_optimizer, "param_group_identifier_keys", ())
    groups = [
        {"params": [main_param], **dict.fromkeys(keys, 1.0)},
        {"params": [], **dict.fromkeys(keys, 1.0), "wd_mult": 0.0},
    ]
    optimizer = DistributedOptimizer.__new__(DistributedOptimizer)
    optimizer.optimizer = FusedAdam(groups, lr=0.1)
    optimizer.model_param_group_index_map = {model_param: (0, 0)}
    param_map = {"param_map": {model_param: param_range}}
    optimizer.gbuf_ranges = [{(torch.float32, torch.float32): [param_map]}]
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
    for _ in range(2):
        main_param.grad = torch.ones_like(main_param)
        optimizer.optimizer.step()
    return optimizer


def _steps(groups):
    return [group.get("step") for group in groups]


def test_an_empty_group_is_saved_with_the_step_of_the_others(optimizer):
    assert _steps(optimizer.optimizer.param_groups) == [2, None]
    assert _steps(optimizer.state_dict()["optimizer"]["param_groups"]) == [2, 2]


def test_a_missing_step_is_loaded_from_the_other_groups(optimizer):
    state_dict = optimizer.state_dict()
    state_dict["optimizer"]["param_groups"][1].pop("step", None)
    optimizer.load_state_dict(state_dict)
    assert _steps(optimizer.optimizer.param_groups) == [2, 2]
