# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param

from unit.common import DistributedTest


def _make_engine(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 4)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    config["zero_optimization"] = {"stage": 3}
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1), config=config)[0]


def _step(engine):
    samples = torch.ones(1, 4, dtype=torch.bfloat16, device=engine.device)
    engine.backward(engine(samples).float().pow(2).mean())
    with torch.no_grad():  # the engine may gather the parameters into views, outside of it
        engine.step()


def _weights(engine):
    found = {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            found[name] = param.detach().clone()
    return found


def _check_weights(engine, expected):
    """And that the next step begins with them."""
    for name, weight in _weights(engine).items():
        assert torch.equal(weight, expected[name]), name
    for name, param in engine.module.named_parameters():
        assert torch.equal(safe_get_full_fp32_param(param), expected[name].float()), name


class TestZeRO3WeightsOfTag(DistributedTest):
    world_size = 2

    def test_weights_are_of_the_tag_and_not_of_the_latest_checkpoint(self, tmpdir):
        engine = _make_engine(seed=0)
        _step(engine)
        engine.save_checkpoint(str(tmpdir), tag=1)
        expected = _weights(engine)
        _step(engine)
        engine.save_checkpoint(str(tmpdir), tag=2)

        loaded = _make_engine(seed=1)
        loaded.load_checkpoint(str(tmpdir), tag=1, load_optimizer_states=False)

        _check_weights(loaded, expected)
