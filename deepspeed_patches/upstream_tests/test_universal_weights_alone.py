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

OPTIONS = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
SAVED, UNIVERSAL = "saved", "universal"
# By the stage, and the type in which gradients are summed up.
OPTIMIZERS = {"stage 1": (1, "bf16"), "stage 2": (2, "bf16"), "BF16_Optimizer": (1, "fp32")}


def _make_engine(optimizer, seed, lr, universal=False):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 4)
    stage, sum_in = OPTIMIZERS[optimizer]
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    config["data_types"] = {"grad_accum_dtype": sum_in}
    config["zero_optimization"] = {"stage": stage, "reduce_bucket_size": 1000}
    config["checkpoint"] = {"load_universal": universal}
    return deepspeed.initialize(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=lr), config=config)[0]


def _step(engine):
    engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16, device=engine.device)).float().pow(2).mean())
    with torch.no_grad():  # the engine may gather the parameters into views, outside of it
        engine.step()


def _save_universal_checkpoint(engine, folder):
    _step(engine)
    info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}, "iteration": 1}
    engine.save_checkpoint(str(folder), tag=SAVED, client_state=info)
    dist.barrier()
    if dist.get_rank() == 0:
        folders = {"input_folder": os.path.join(folder, SAVED), "output_folder": os.path.join(folder, UNIVERSAL)}
        convert_to_universal(argparse.Namespace(**folders, inject_missing_state=True, **OPTIONS))
    dist.barrier()


def _masters(engine):
    return {name: safe_get_full_fp32_param(param).clone() for name, param in engine.module.named_parameters()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
class TestUniversalWeightsAlone(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("option", ["load_optimizer_states", "load_module_only"])
    def test_nothing_but_the_weights_is_loaded(self, optimizer, option, tmpdir):
        engine = _make_engine(optimizer, seed=0, lr=0.1)
        _save_universal_checkpoint(engine, tmpdir)
        expected = _masters(engine)

        loaded = _make_engine(optimizer, seed=1, lr=0.2, universal=True)
        loaded.load_checkpoint(str(tmpdir), tag=UNIVERSAL, **{option: option == "load_module_only"})

        for name, master in _masters(loaded).items():
            assert torch.equal(master, expected[name]), name
        for name, param in loaded.module.named_parameters():
            assert torch.equal(param, expected[name].bfloat16()), name
        inner = loaded.optimizer.optimizer
        assert [key for state in inner.state.values() for key in state] == []
        assert [group["lr"] for group in inner.param_groups] == [0.2]
        _step(loaded)
