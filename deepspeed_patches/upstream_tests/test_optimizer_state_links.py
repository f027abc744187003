# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state

from unit.common import DistributedTest

# By the stage, and the type in which gradients are summed up.
OPTIMIZERS = {"stage 1": (1, "bf16"), "stage 2": (2, "bf16"), "BF16_Optimizer": (1, "fp32")}


class TwoParameters(torch.nn.Module):
    """The gradient of the first is the input, that of the second twice the input."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(4))
        self.second = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return (self.first * x + self.second * 2 * x).sum()


INPUT = torch.arange(1.0, 5.0)
GRADIENTS = {"first": INPUT, "second": 2 * INPUT}


def _make_engine(optimizer):
    """Each parameter is a param group of its own, of which every rank has a half."""
    model = TwoParameters()
    # With these betas the moments are exact.
    adam = torch.optim.Adam([{"params": [param]} for param in model.parameters()], betas=(0.5, 0.5))
    stage, sum_in = OPTIMIZERS[optimizer]
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "bf16": {"enabled": True}}
    config["data_types"] = {"grad_accum_dtype": sum_in}
    config["zero_optimization"] = {"stage": stage, "reduce_bucket_size": 1000}
    return deepspeed.initialize(model=model, optimizer=adam, config=config)[0]


def _step(engine):
    engine.backward(engine(INPUT.bfloat16().to(engine.device)))
    with torch.no_grad():  # the engine may gather the parameters into views, outside of it
        engine.step()


def _check_moments(engine, steps):
    done = 1 - 0.5**steps
    for name, param in engine.module.named_parameters():
        for key, expected in (("exp_avg", GRADIENTS[name]), ("exp_avg_sq", GRADIENTS[name]**2)):
            found = safe_get_full_optimizer_state(param, key)
            assert torch.equal(found.cpu(), done * expected), (name, key)


class TestOptimizerStateLinks(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_every_group_is_linked_after_a_step(self, optimizer):
        engine = _make_engine(optimizer)
        for steps in (1, 2):
            _step(engine)
            _check_moments(engine, steps)

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_links_are_made_again_after_a_checkpoint_is_loaded(self, optimizer, tmpdir):
        engine = _make_engine(optimizer)
        _step(engine)
        engine.save_checkpoint(str(tmpdir), tag="step1")
        _step(engine)
        engine.load_checkpoint(str(tmpdir), tag="step1")
        _check_moments(engine, steps=1)
        _step(engine)
        _check_moments(engine, steps=2)
