# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from unit.common import DistributedTest

CONFIG = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
CONFIG["data_types"] = {"grad_accum_dtype": "fp32"}


class TestZeroToFP32OfBF16Optimizer(DistributedTest):
    world_size = 2

    def test_the_masters_are_read(self, tmpdir):
        model = torch.nn.Linear(4, 4)
        engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=CONFIG)[0]
        samples = torch.ones(1, 4, dtype=torch.bfloat16, device=engine.device)
        engine.backward(engine(samples).float().pow(2).mean())
        engine.step()
        engine.save_checkpoint(str(tmpdir))

        states = get_fp32_state_dict_from_zero_checkpoint(str(tmpdir))

        for name, param in engine.module.named_parameters():
            assert torch.equal(states[name], safe_get_full_fp32_param(param).cpu()), name
