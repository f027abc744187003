# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import os

import deepspeed
import pytest
import torch

from unit.common import DistributedTest

CONFIG = {"train_batch_size": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}
TAG = "step2"


def _make_engine(seed, with_optimizer=True):
    """Without ZeRO."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1) if with_optimizer else None
    return deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]


def _train(engine, steps):
    losses = []
    for step in steps:
        samples = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).bfloat16()
        loss = engine(samples.to(engine.device)).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _saved(folder):
    engine = _make_engine(seed=0)
    _train(engine, range(2))
    engine.save_checkpoint(str(folder), tag=TAG)
    return engine


class TestBF16WithoutZeRO(DistributedTest):
    world_size = 1

    def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(self, tmpdir):
        expected = _train(_saved(tmpdir), range(2, 5))

        engine = _make_engine(seed=1)
        engine.load_checkpoint(str(tmpdir), tag=TAG)

        assert _train(engine, range(2, 5)) == expected

    def test_a_checkpoint_without_the_state_is_refused(self, tmpdir):
        saved = _saved(tmpdir)
        path = os.path.join(tmpdir, TAG, "mp_rank_00_model_states.pt")
        torch.save({**torch.load(path, weights_only=False), "optimizer": None}, path)

        engine = _make_engine(seed=1)
        with pytest.raises(RuntimeError, match=r"expected the optimizer's state in .*, found none"):
            engine.load_checkpoint(str(tmpdir), tag=TAG)

        engine.load_checkpoint(str(tmpdir), tag=TAG, load_optimizer_states=False)
        found = engine.module.state_dict()
        assert all(found[name].equal(weight) for name, weight in saved.module.state_dict().items())
