# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from unit.common import DistributedTest


def _make_engine(stage, seed=0, grad_accum_dtype=None, is_pipeline=False):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    if is_pipeline:
        model = PipelineModule(layers=layers, num_stages=2, loss_fn=torch.nn.MSELoss())
    else:
        model = torch.nn.Sequential(*layers)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {
            "enabled": True
        },
        "data_types": {
            "grad_accum_dtype": grad_accum_dtype
        },
        "zero_optimization": {
            "stage": stage
        }
    }
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)[0]


class TestBF16WrapperName(DistributedTest):
    world_size = 2

    def test_fp32_accumulation_at_stage_1_takes_bf16_optimizer(self, tmpdir):
        engine = _make_engine(stage=1, grad_accum_dtype="fp32")
        assert isinstance(engine.optimizer, BF16_Optimizer)
        samples = torch.ones((1, 4), dtype=torch.bfloat16, device=engine.device)
        engine.backward(engine(samples).float().pow(2).mean())
        engine.step()
        engine.save_checkpoint(str(tmpdir), tag="step1")

        resumed = _make_engine(stage=1, seed=1, grad_accum_dtype="fp32")
        resumed.load_checkpoint(str(tmpdir), tag="step1")

        for found, expected in zip(resumed.optimizer.fp32_groups_flat_partition,
                                   engine.optimizer.fp32_groups_flat_partition):
            assert torch.equal(found, expected)

    def test_pipeline_parallelism_takes_bf16_optimizer(self):
        engine = _make_engine(stage=0, is_pipeline=True)
        assert isinstance(engine.optimizer, BF16_Optimizer)

    def test_others_stay_as_they_were(self):
        assert not isinstance(_make_engine(stage=0).optimizer, BF16_Optimizer)
        engine = _make_engine(stage=2, grad_accum_dtype="fp32")
        assert isinstance(engine.optimizer, DeepSpeedZeroOptimizer)
