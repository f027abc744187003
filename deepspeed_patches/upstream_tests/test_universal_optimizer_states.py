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
STATES = {"sgd": set(), "momentum": {"momentum_buffer"}, "amsgrad": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}}


def _make_optimizer(name, params):
    if name == "amsgrad":
        return torch.optim.AdamW(params, lr=1e-2, amsgrad=True)
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9 if name == "momentum" else 0)


def _make_engine(name, stage, seed, universal=False):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 4)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
    config["bf16"] = {"enabled": True}
    config["zero_optimization"] = {"stage": stage, "reduce_bucket_size": 1000}
    config["checkpoint"] = {"load_universal": universal}
    return deepspeed.initialize(model=model, optimizer=_make_optimizer(name, model.parameters()), config=config)[0]


def _step(engine):
    inputs = torch.arange(1., 5).bfloat16().to(engine.device)
    engine.backward(engine(inputs).float().pow(2).mean())
    with torch.no_grad():  # the engine may gather the parameters into views, outside of it
        engine.step()


def _flat_states(engine):
    optimizer = engine.optimizer
    flat = getattr(optimizer, "fp32_partitioned_groups_flat", None) or optimizer.single_partition_of_fp32_groups
    own = optimizer.optimizer.state.get(flat[0], {})
    tensors = {key: value for key, value in own.items() if torch.is_tensor(value) and value.dim() == 1}
    return {"fp32": flat[0].detach().clone(), **{key: value.clone() for key, value in tensors.items()}}


def _save_universal_checkpoint(engine, steps, folder):
    info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}, "iteration": steps}
    engine.save_checkpoint(str(folder), tag=SAVED, client_state=info)
    dist.barrier()
    if dist.get_rank() == 0:
        folders = {"input_folder": os.path.join(folder, SAVED), "output_folder": os.path.join(folder, UNIVERSAL)}
        convert_to_universal(argparse.Namespace(**folders, inject_missing_state=True, **OPTIONS))
    dist.barrier()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["sgd", "momentum", "amsgrad"])
class TestUniversalOptimizerStates(DistributedTest):
    world_size = 2

    def test_the_states_of_the_optimizer_are_loaded(self, name, stage, tmpdir):
        engine = _make_engine(name, stage, seed=0)
        for _ in range(2):
            _step(engine)
        saved = _flat_states(engine)
        assert saved.keys() == {"fp32"} | STATES[name]
        _save_universal_checkpoint(engine, 2, tmpdir)
        loaded = _make_engine(name, stage, seed=1, universal=True)
        loaded.load_checkpoint(str(tmpdir), tag=UNIVERSAL)
        found = _flat_states(loaded)
        assert found.keys() == saved.keys()
        assert all(found[key].equal(saved[key]) for key in saved)
        _step(loaded)

    def test_a_run_that_goes_back_to_its_beginning_keeps_no_states(self, name, stage, tmpdir):
        _save_universal_checkpoint(_make_engine(name, stage, seed=0), 0, tmpdir)
        loaded = _make_engine(name, stage, seed=1, universal=True)
        _step(loaded)
        loaded.load_checkpoint(str(tmpdir), tag=UNIVERSAL)
        assert _flat_states(loaded).keys() == {"fp32"}
        _step(loaded)
