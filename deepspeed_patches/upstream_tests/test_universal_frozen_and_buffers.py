# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import argparse
import os

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.checkpoint.ds_to_universal import main as convert_to_universal

from unit.common import DistributedTest

OPTIONS = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
SAVED, UNIVERSAL = "saved", "universal"


class Adapted(torch.nn.Module):
    """A frozen layer, a trained one, and a buffer."""

    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(4, 3)
        self.base.requires_grad_(False)
        self.adapter = torch.nn.Linear(3, 1)
        self.register_buffer("seen", torch.randn(5))

    def forward(self, x):
        return self.adapter(self.base(x))


def _make_engine(stage, seed, universal=False):
    torch.manual_seed(seed)
    model = Adapted()
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    config["zero_optimization"] = {"stage": stage, "reduce_bucket_size": 1000}
    config["checkpoint"] = {"load_universal": universal}
    optimizer = torch.optim.Adam(model.adapter.parameters())
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _states(engine):
    found = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            found[name] = param.detach().clone()
    return found


def _save_universal_checkpoint(engine, folder, **options):
    engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16, device=engine.device)).float().pow(2).mean())
    with torch.no_grad():  # the engine may gather the parameters into views, outside of it
        engine.step()
    info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}, "iteration": 1}
    engine.save_checkpoint(str(folder), tag=SAVED, client_state=info, **options)
    dist.barrier()
    if dist.get_rank() == 0:
        folders = {"input_folder": os.path.join(folder, SAVED), "output_folder": os.path.join(folder, UNIVERSAL)}
        convert_to_universal(argparse.Namespace(**folders, inject_missing_state=True, **OPTIONS))
    dist.barrier()
    return _states(engine)


@pytest.mark.parametrize("stage", [1, 2, 3])
class TestUniversalFrozenAndBuffers(DistributedTest):
    world_size = 2

    def test_all_that_was_saved_is_loaded(self, stage, tmpdir):
        expected = _save_universal_checkpoint(_make_engine(stage, seed=0), tmpdir)

        engine = _make_engine(stage, seed=1, universal=True)
        engine.load_checkpoint(str(tmpdir), tag=UNIVERSAL)

        found = _states(engine)
        assert found.keys() == expected.keys()
        for name, state in expected.items():
            assert torch.equal(found[name], state), name

    def test_what_was_not_saved_is_an_error_unless_it_may_be_missing(self, stage, tmpdir):
        _save_universal_checkpoint(_make_engine(stage, seed=0), tmpdir, exclude_frozen_parameters=True)

        with pytest.raises(RuntimeError, match="found no base"):
            _make_engine(stage, seed=1, universal=True).load_checkpoint(str(tmpdir), tag=UNIVERSAL)

        engine = _make_engine(stage, seed=1, universal=True)
        expected = _states(engine)
        engine.load_checkpoint(str(tmpdir), tag=UNIVERSAL, load_module_strict=False)
        found = _states(engine)
        assert torch.equal(found["base.weight"], expected["base.weight"])
        assert not torch.equal(found["seen"], expected["seen"])
