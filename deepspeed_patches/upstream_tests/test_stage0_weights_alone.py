# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator

from unit.common import DistributedTest

PRECISIONS = {"fp16": {"enabled": True, "initial_scale_power": 4}, "bf16": {"enabled": True}}


def _make_engine(precision, seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 4)
    config = {"train_micro_batch_size_per_gpu": 1, precision: PRECISIONS[precision], "zero_optimization": {"stage": 0}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _step(engine):
    samples = torch.ones(1, 4, dtype=engine.module.weight.dtype, device=engine.device)
    engine.backward(engine(samples).float().pow(2).mean())
    engine.step()


@pytest.mark.parametrize("precision", PRECISIONS)
class TestStage0WeightsAlone(DistributedTest):
    world_size = 1

    def test_the_next_step_begins_with_the_loaded_weights(self, precision, tmpdir):
        if precision == "fp16" and not get_accelerator().is_fp16_supported():
            pytest.skip("fp16 is not supported")
        engine = _make_engine(precision, seed=0)
        _step(engine)
        engine.save_checkpoint(str(tmpdir), tag="step1")
        saved = {name: param.detach().float().clone() for name, param in engine.module.named_parameters()}

        loaded = _make_engine(precision, seed=1)
        loaded.load_checkpoint(str(tmpdir), tag="step1", load_optimizer_states=False)
        _step(loaded)

        for name, param in loaded.module.named_parameters():
            assert (param.float() - saved[name]).abs().max() < 0.02, name  # Adam's first step is the rate
