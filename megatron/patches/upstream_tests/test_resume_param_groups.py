# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest
import torch

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

MAIN = {"wd_mult": 1.0, "max_lr": 1e-3, "min_lr": 1e-4, "default_config": True}
BIAS = {**MAIN, "wd_mult": 0.0}
EMBEDDING = {**MAIN, "max_lr": 1e-4, "min_lr": 1e-5, "default_config": False}
COMMON = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}


def make_optimizer(*groups):
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(2))], **COMMON, **group} for group in groups
    ]
    optimizer = DistributedOptimizer.__new__(DistributedOptimizer)
    optimizer.optimizer = torch.optim.SGD(groups, lr=0.1)
    optimizer.config = SimpleNamespace(fp16=False)
    optimizer.ddp_config = SimpleNamespace(use_megatron_fsdp=False, use_custom_fsdp=False)
    optimizer.gbuf_ranges = []
    optimizer.grad_scaler = None
    return optimizer


def load(optimizer, *saved):
    """Load param groups, and return the names that the optimizer's groups have then."""
    groups = [{"lr": 0.1, "step": 3, **COMMON, **group} for group in saved]
    optimizer.load_state_dict({"optimizer": {"param_groups": groups}})
    return [group["name"] for group in optimizer.optimizer.param_groups]


def test_settings_go_to_the_group_that_they_were_saved_for():
    optimizer = make_optimizer(BIAS, MAIN)
    params = [group["params"] for group in optimizer.optimizer.param_groups]

    assert load(optimizer, {**MAIN, "name": "main"}, {**BIAS, "name": "bias"}) == ["bias", "main"]
    assert [group["params"] for group in optimizer.optimizer.param_groups] == params


def test_a_new_learning_rate():
    optimizer = make_optimizer(
        {**MAIN, "max_lr": 1e-4}, {**EMBEDDING, "max_lr": 2e-4}, {**BIAS, "max_lr": 1e-4}
    )
    saved = [
        {**group, "name": name}
        for name, group in (("bias", BIAS), ("main", MAIN), ("embedding", EMBEDDING))
    ]

    assert load(optimizer, *saved) == ["main", "embedding", "bias"]


def test_a_group_without_a_saved_one_is_told():
    optimizer = make_optimizer(MAIN, EMBEDDING)

    with pytest.raises(ValueError, match="Cannot tell whose settings a param group resumes with"):
        load(optimizer, {**MAIN, "name": "main"}, {**BIAS, "name": "bias"})
