# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import os

import deepspeed
import deepspeed.comm as dist
import torch

from unit.common import DistributedTest

CONFIG = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
CONFIG["checkpoint"] = {"writer": {"type": "python", "decoupled": True}}


class TestDecoupledLastSave(DistributedTest):
    world_size = 2
    non_daemonic_procs = True  # the writer is a process of each rank

    def test_latest_names_it(self, tmpdir, monkeypatch):
        monkeypatch.setenv("CROSS_SIZE", "1")
        monkeypatch.setenv("CROSS_RANK", "0")
        model = torch.nn.Linear(4, 4)
        engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=CONFIG)[0]
        engine.save_checkpoint(str(tmpdir), tag="last")

        engine.destroy()

        dist.barrier()
        with open(os.path.join(tmpdir, "latest")) as fd:
            assert fd.read() == "last"
