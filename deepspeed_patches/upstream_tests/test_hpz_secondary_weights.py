# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import deepspeed
import pytest
import torch

from unit.common import DistributedTest


def _make_engine(seed, persistence_threshold):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {
            "enabled": True
        },
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": persistence_threshold,
            "zero_hpz_partition_size": 2
        },
    }
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _step(engine):
    """Train a step, and return its loss."""
    samples = torch.ones((1, 4), dtype=torch.bfloat16, device=engine.device)
    loss = engine(samples).float().pow(2).mean()
    engine.backward(loss)
    with torch.no_grad():  # the engine may gather the parameters into views, outside of it
        engine.step()
    return loss.item()


class TestHpzSecondaryWeights(DistributedTest):
    world_size = 4

    @pytest.mark.parametrize("persistence_threshold", [0, 1000])
    def test_training_goes_on_with_the_loaded_weights(self, tmpdir, persistence_threshold):
        engine = _make_engine(0, persistence_threshold)
        _step(engine)
        engine.save_checkpoint(str(tmpdir), tag="step1")
        expected = [_step(engine) for _ in range(2)]

        resumed = _make_engine(1, persistence_threshold)
        resumed.load_checkpoint(str(tmpdir), tag="step1")

        assert [_step(resumed) for _ in range(2)] == expected
