# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import deepspeed
import torch

from unit.common import DistributedTest

CONFIG = {"train_batch_size": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}


class TestBF16WithoutZeROGradients(DistributedTest):
    world_size = 1

    def test_a_step_leaves_no_gradients(self):
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]

        engine.backward(engine(torch.ones(4, 4, dtype=torch.bfloat16, device=engine.device)).float().pow(2).mean())
        engine.step()

        assert [parameter.grad for parameter in engine.module.parameters()] == [None, None]
