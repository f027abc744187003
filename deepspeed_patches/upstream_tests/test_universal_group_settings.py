# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

from types import SimpleNamespace

import pytest
import torch
from deepspeed.checkpoint.ds_to_universal import _save_optimizer_state
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import logger

SAVED = [{"lr": 0.5, "betas": (0.8, 0.9), "params": [0]}, {"lr": 0.25, "weight_decay": 0.125, "params": [1]}]
OPTIMIZERS = pytest.mark.parametrize("cls", [DeepSpeedZeroOptimizer, BF16_Optimizer])


def test_a_universal_checkpoint_has_the_settings(tmp_path):
    rank_state = {
        "optimizer_state_dict": {
            "base_optimizer_state": {
                "state": {},
                "param_groups": SAVED
            },
            "ds_version": "0.14.0",
        }
    }
    checkpoint = SimpleNamespace(get_zero_checkpoint_state=lambda **indices: rank_state)
    _save_optimizer_state(SimpleNamespace(output_folder=str(tmp_path)), checkpoint)
    assert torch.load(tmp_path / "zero" / "optimizer_state.pt") == {"ds_version": "0.14.0", "param_groups": SAVED}


def _optimizer(cls):
    """What these optimizers have of two parameter groups that own nothing on this rank but padding."""
    optimizer = cls.__new__(cls)
    flat_groups = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer.optimizer = torch.optim.AdamW([{"params": [flat]} for flat in flat_groups], lr=1.0, eps=0.75)
    optimizer.bit16_groups = optimizer.bf16_groups = [[], []]
    optimizer.param_names = {}
    optimizer.mpu = SimpleNamespace(
        get_tensor_model_parallel_rank=lambda: 0,
        get_tensor_model_parallel_world_size=lambda: 1,
        get_slice_parallel_world_size=lambda: 1,
    )
    optimizer.loss_scaler = optimizer.dynamic_loss_scale = optimizer.overflow = optimizer.clip_grad = None
    optimizer.partition_gradients = True
    return optimizer


def _load(optimizer, folder, **settings):
    (folder / "zero").mkdir()
    torch.save({"ds_version": "0.14.0", **settings}, folder / "zero" / "optimizer_state.pt")
    optimizer._load_hp_checkpoint_state(str(folder))


@OPTIMIZERS
def test_a_load_restores_the_settings(cls, tmp_path):
    optimizer = _optimizer(cls)
    groups = optimizer.optimizer.param_groups
    params = [group["params"] for group in groups]
    _load(optimizer, tmp_path, param_groups=SAVED)
    assert (groups[0]["lr"], groups[0]["betas"], groups[0]["eps"]) == (0.5, (0.8, 0.9), 0.75)
    assert (groups[1]["lr"], groups[1]["weight_decay"]) == (0.25, 0.125)
    assert optimizer.optimizer.param_groups is groups
    assert all(group["params"] is params[i] for i, group in enumerate(groups))


@OPTIMIZERS
@pytest.mark.parametrize("settings", [{}, {"param_groups": SAVED[:1]}], ids=["none", "of other groups"])
def test_a_load_says_that_the_settings_are_its_own(cls, settings, tmp_path, caplog):
    optimizer = _optimizer(cls)
    before = [dict(group) for group in optimizer.optimizer.param_groups]
    logger.addHandler(caplog.handler)
    try:
        _load(optimizer, tmp_path, **settings)
    finally:
        logger.removeHandler(caplog.handler)
    assert optimizer.optimizer.param_groups == before
    (warning, ) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"has settings of {len(settings.get('param_groups', []))} param groups, and this run has 2" in warning
