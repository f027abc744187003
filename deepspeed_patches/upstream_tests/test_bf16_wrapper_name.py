# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

from types import MethodType, SimpleNamespace

import pytest
import torch
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime import engine as runtime_engine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import DummyOptim


@pytest.fixture(autouse=True)
def no_other_rank(monkeypatch):
    monkeypatch.setattr(runtime_engine, "is_zero_supported_optimizer", lambda optimizer: True)
    monkeypatch.setattr(bf16_optimizer, "see_memory_usage", lambda *args, **kwargs: None)
    monkeypatch.setattr(bf16_optimizer.dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(bf16_optimizer.dist, "get_world_size", lambda group=None: 1)


def _chosen(stage, accumulation, pipeline=False):
    """The optimizer that a bf16 engine chooses, by the method that makes it."""
    engine = SimpleNamespace(
        get_data_types=lambda: (torch.bfloat16, accumulation),
        zero_optimization=lambda: stage > 0,
        zero_optimization_stage=lambda: stage,
        zero_use_cpu_optimizer=lambda: False,
        zero_cpu_offload=lambda: False,
        amp_enabled=lambda: False,
        pipeline_parallelism=pipeline,
        has_moe_layers=False,
        global_rank=1,
        _supported_optims=lambda: [torch.optim.Optimizer],
        _check_for_duplicates=lambda optimizer: None,
        _configure_compression_scheduler=lambda: None,
        _configure_quantization=lambda: None,
    )
    engine._configure_zero_optimizer = lambda *args: "zero"
    engine._configure_fp16_optimizer = lambda *args: "fp16"
    engine._configure_bf16_optimizer = lambda *args: "bf16"
    engine._do_optimizer_sanity_check = MethodType(DeepSpeedEngine._do_optimizer_sanity_check, engine)
    DeepSpeedEngine._configure_optimizer(engine, torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]), None)
    return engine.optimizer


def test_fp32_accumulation_at_stage_1_takes_bf16_optimizer():
    assert _chosen(stage=1, accumulation=torch.float32) == "bf16"


def test_pipeline_parallelism_takes_bf16_optimizer():
    assert _chosen(stage=0, accumulation=torch.bfloat16, pipeline=True) == "bf16"


def test_others_stay_as_they_were():
    assert _chosen(stage=0, accumulation=torch.bfloat16) == "fp16"
    assert _chosen(stage=2, accumulation=torch.float32) == "zero"


@pytest.mark.skipif(not hasattr(BF16_Optimizer, "scale_if_loss"), reason="each optimizer has a backward of its own")
def test_bf16_optimizer_does_not_scale_losses():
    config = SimpleNamespace(enabled=True, immediate_grad_update=False)
    optimizer = BF16_Optimizer(DummyOptim([]), {}, bfloat16_config=config, grad_acc_dtype=torch.float32)
    loss = torch.ones((), requires_grad=True) * 3

    assert not optimizer.needs_scaler()
    assert optimizer.scale_if_loss(loss) is loss
