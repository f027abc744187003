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
from deepspeed.utils import safe_get_full_fp32_param

from unit.common import DistributedTest

SAVED, UNIVERSAL = "saved", "universal"


def _make_engine(seed, lr, features=4, universal=False):
    torch.manual_seed(seed)
    model = torch.nn.Linear(features, 4)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {
            "enabled": True
        },
        "zero_optimization": {
            "stage": 3
        },
        "checkpoint": {
            "load_universal": universal
        },
    }
    return deepspeed.initialize(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=lr), config=config)[0]


def _step(engine):
    samples = torch.ones(1, 4, dtype=torch.bfloat16, device=engine.device)
    engine.backward(engine(samples).float().pow(2).mean())
    with torch.no_grad():  # the engine may gather the parameters into views, outside of it
        engine.step()


def _save_universal_checkpoint(engine, folder):
    _step(engine)
    info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}, "iteration": 1}
    engine.save_checkpoint(str(folder), tag=SAVED, client_state=info)
    dist.barrier()
    if dist.get_rank() == 0:
        convert_to_universal(
            argparse.Namespace(
                input_folder=os.path.join(folder, SAVED),
                output_folder=os.path.join(folder, UNIVERSAL),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=False,
            ))
    dist.barrier()


def _masters(engine):
    return {name: safe_get_full_fp32_param(param).clone() for name, param in engine.module.named_parameters()}


@pytest.mark.parametrize("option", ["load_optimizer_states", "load_module_only"])
class TestZeRO3UniversalWeightsAlone(DistributedTest):
    world_size = 2

    def test_nothing_but_the_weights_is_loaded(self, option, tmpdir):
        engine = _make_engine(seed=0, lr=0.1)
        _save_universal_checkpoint(engine, tmpdir)
        expected = _masters(engine)

        loaded = _make_engine(seed=1, lr=0.2, universal=True)
        loaded.load_checkpoint(str(tmpdir), tag=UNIVERSAL, **{option: option == "load_module_only"})

        for name, master in _masters(loaded).items():
            assert torch.equal(master, expected[name]), name
        for name, param in loaded.module.named_parameters():
            with deepspeed.zero.GatheredParameters([param]):
                assert torch.equal(param, expected[name].bfloat16()), name
        inner = loaded.optimizer.optimizer
        assert [key for state in inner.state.values() for key in state] == []
        assert [group["lr"] for group in inner.param_groups] == [0.2]
        _step(loaded)

    def test_a_parameter_of_another_size_is_refused(self, option, tmpdir):
        _save_universal_checkpoint(_make_engine(seed=0, lr=0.1), tmpdir)

        loaded = _make_engine(seed=1, lr=0.1, features=6, universal=True)
        with pytest.raises(ValueError, match="weight has another size"):
            loaded.load_checkpoint(str(tmpdir), tag=UNIVERSAL, **{option: option == "load_module_only"})
