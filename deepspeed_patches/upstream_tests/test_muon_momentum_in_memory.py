# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import deepspeed
import torch

from unit.common import DistributedTest


def _make_engine(seed):
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
            "stage": 3,
            "reduce_scatter": False,
            "reduce_bucket_size": 1000,
            "save_muon_momentum_buffer_in_memory": True
        },
    }
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def _train(engine):
    """Two steps, whose gradients the momentum makes a difference to."""
    for step in range(2):
        inputs = torch.arange(1. + step, 5 + step).bfloat16().to(engine.device)
        engine.backward((engine(inputs).float() - 1).pow(2).mean())
        with torch.no_grad():  # the engine may gather the parameters into views, outside of it
            engine.step()


def _states(engine):
    zero = engine.optimizer
    fp32 = zero.fp32_partitioned_groups_flat[0]
    return {"fp32": fp32.detach().clone(), "momentum": zero.optimizer.state[fp32]["momentum_buffer"].clone()}


class TestMuonMomentumInMemory(DistributedTest):
    world_size = 2

    def test_training_goes_on_with_the_saved_momentum(self, tmpdir):
        with torch.compiler.set_stance("force_eager"):
            engine = _make_engine(seed=0)
            _train(engine)
            engine.save_checkpoint(str(tmpdir), tag="saved")
            _train(engine)

            resumed = _make_engine(seed=1)
            resumed.load_checkpoint(str(tmpdir), tag="saved")
            _train(resumed)

            expected, found = _states(engine), _states(resumed)
            assert expected["momentum"].any()
            assert all(torch.equal(found[key], expected[key]) for key in expected)
