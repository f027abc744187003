# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import deepspeed
import pytest
import torch

from unit.common import DistributedTest


def _make_engine(stage, seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 4, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {
            "enabled": True
        },
        "optimizer": {
            "type": "Muon",
            "params": {
                "lr": 0.02
            }
        },
        "zero_optimization": {
            "stage": stage,
            "reduce_scatter": False,
            "reduce_bucket_size": 1000
        },
    }
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def _train(engine):
    """Two steps, whose gradients the momentum makes a difference to."""
    for step in range(2):
        inputs = torch.arange(1. + step, 5 + step).bfloat16().to(engine.device)
        engine.backward((engine(inputs).float() - 1).pow(2).mean())
        engine.step()


def _momentum(engine):
    state = engine.optimizer.optimizer.state[engine.optimizer.optimizer.param_groups[0]["params"][0]]
    return state["momentum_buffer"].clone()


@pytest.mark.parametrize("stage", [1, 2])
class TestMuonMomentumDtype(DistributedTest):
    world_size = 2

    def test_training_goes_on_with_the_saved_momentum(self, stage, tmpdir):
        with torch.compiler.set_stance("force_eager"):
            engine = _make_engine(stage, seed=0)
            _train(engine)
            engine.save_checkpoint(str(tmpdir), tag="saved")
            _train(engine)

            resumed = _make_engine(stage, seed=1)
            resumed.load_checkpoint(str(tmpdir), tag="saved")
            _train(resumed)

            assert _momentum(engine).any()
            assert torch.equal(_momentum(resumed), _momentum(engine))
            assert torch.equal(resumed.module.weight, engine.module.weight)
