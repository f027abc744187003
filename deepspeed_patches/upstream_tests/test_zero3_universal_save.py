# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import argparse
import os

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.checkpoint.ds_to_universal import main as convert_to_universal

from unit.common import DistributedTest

UNIVERSAL = "universal"


def _make_engine(load_universal):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {
            "enabled": True
        },
        "zero_optimization": {
            "stage": 3
        },
        "checkpoint": {
            "load_universal": load_universal
        }
    }
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)[0]


def _train_and_save(engine, folder, tag):
    samples = torch.ones((1, 4), dtype=torch.bfloat16, device=engine.device)
    engine.backward(engine(samples).float().pow(2).mean())
    engine.step()
    info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}, "iteration": 1}
    engine.save_checkpoint(folder, tag=tag, client_state=info)


def _convert(folder, tag):
    if dist.get_rank() == 0:
        convert_to_universal(
            argparse.Namespace(input_folder=os.path.join(folder, tag),
                               output_folder=os.path.join(folder, UNIVERSAL),
                               num_extract_workers=1,
                               num_merge_workers=1,
                               keep_temp_folder=False,
                               strict=True,
                               inject_missing_state=False))
    dist.barrier()


class TestZeRO3UniversalSave(DistributedTest):
    world_size = 2

    def test_a_run_that_loads_universal_checkpoints_saves_what_can_be_resumed(self, tmpdir):
        _train_and_save(_make_engine(load_universal=False), str(tmpdir), tag="first")
        _convert(str(tmpdir), tag="first")
        engine = _make_engine(load_universal=True)
        engine.load_checkpoint(str(tmpdir), tag=UNIVERSAL)

        _train_and_save(engine, str(tmpdir), tag="second")

        name = f"zero_pp_rank_{dist.get_rank()}_mp_rank_00_model_states.pt"
        assert os.path.exists(os.path.join(tmpdir, "second", name))
        resumed = _make_engine(load_universal=False)
        resumed.load_checkpoint(str(tmpdir), tag="second")
        for found, expected in zip(resumed.optimizer.fp32_partitioned_groups_flat,
                                   engine.optimizer.fp32_partitioned_groups_flat):
            assert torch.equal(found, expected)
