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
STATES = ("fp32", "exp_avg", "exp_avg_sq")


def _make_engine(stage, round_robin=True, universal=False, seed=0):
    """Of four parameters, whose order in the flat buffer is another one."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 1))
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    config["zero_optimization"] = {"stage": stage, "reduce_bucket_size": 1000, "round_robin_gradients": round_robin}
    config["checkpoint"] = {"load_universal": universal}
    return deepspeed.initialize(model=model, optimizer=torch.optim.Adam(model.parameters()), config=config)[0]


def _train(engine):
    for step in range(2):
        samples = torch.ones(1, 4, dtype=torch.bfloat16, device=engine.device) * (step + 1)
        engine.backward(engine(samples).float().pow(2).mean())
        with torch.no_grad():  # the engine may gather the parameters into views, outside of it
            engine.step()


def _states(engine):
    """Of each parameter, cut from the flat buffer; not by the links."""
    optimizer = engine.optimizer
    names = {param: name for name, param in engine.module.named_parameters()}
    master = optimizer.single_partition_of_fp32_groups[0]
    states = {}
    for key, partition in {"fp32": master.detach(), **optimizer.optimizer.state[master]}.items():
        if key in STATES:
            partitions = [torch.empty_like(partition) for _ in range(dist.get_world_size())]
            dist.all_gather(partitions, partition.contiguous())
            flat = torch.cat(partitions)
            for param in optimizer.round_robin_bit16_groups[0]:
                states[names[param], key], flat = flat[:param.numel()].view(param.shape), flat[param.numel():]
    return states


def _save(engine, folder):
    info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}, "iteration": 2}
    engine.save_checkpoint(str(folder), tag=SAVED, client_state=info)
    dist.barrier()


def _convert(folder):
    if dist.get_rank() == 0:
        folders = {"input_folder": os.path.join(folder, SAVED), "output_folder": os.path.join(folder, UNIVERSAL)}
        convert_to_universal(argparse.Namespace(**folders, inject_missing_state=True, **OPTIONS))
    dist.barrier()


@pytest.mark.parametrize("stage", [1, 2])
class TestRoundRobinLinks(DistributedTest):
    world_size = 2

    def test_links_are_to_the_own_part_of_the_buffer(self, stage):
        engine = _make_engine(stage)
        _train(engine)

        expected = _states(engine)
        for name, param in engine.module.named_parameters():
            assert torch.equal(safe_get_full_fp32_param(param), expected[name, "fp32"]), name

    @pytest.mark.parametrize("round_robin", [True, False])
    def test_a_universal_checkpoint_is_loaded(self, stage, round_robin, tmpdir):
        engine = _make_engine(stage)
        _train(engine)
        _save(engine, tmpdir)
        _convert(tmpdir)

        loaded = _make_engine(stage, round_robin, universal=True, seed=1)
        loaded.load_checkpoint(str(tmpdir), tag=UNIVERSAL)

        found = _states(loaded)
        for name_and_key, expected in _states(engine).items():
            assert torch.equal(found[name_and_key], expected), name_and_key
        trained = dict(engine.module.named_parameters())
        assert all(torch.equal(param, trained[name]) for name, param in loaded.module.named_parameters())
