# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import os

import deepspeed
import deepspeed.comm as dist
import torch

from unit.common import DistributedTest


def _make_engine():
    model = torch.nn.Linear(4, 4)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    config["zero_optimization"] = {"stage": 1}
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)[0]


class TestLatestReplaced(DistributedTest):
    world_size = 2

    def test_the_file_is_never_without_a_name(self, tmpdir):
        """The old file, under a second name, keeps what it had."""
        engine = _make_engine()
        latest, kept = os.path.join(tmpdir, "latest"), os.path.join(tmpdir, "kept")
        engine.save_checkpoint(str(tmpdir), tag="first")
        if dist.get_rank() == 0:
            os.link(latest, kept)

        engine.save_checkpoint(str(tmpdir), tag="second")

        dist.barrier()
        found = []
        for path in (kept, latest):
            with open(path) as fd:
                found.append(fd.read())
        assert found == ["first", "second"]
        assert not os.path.exists(f"{latest}.tmp")
