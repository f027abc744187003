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

UNIVERSAL = "universal"


def _make_engine(load_universal=False):
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


def _save_universal(engine, folder):
    samples = torch.ones((1, 4), dtype=torch.bfloat16, device=engine.device)
    engine.backward(engine(samples).float().pow(2).mean())
    engine.step()
    info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}, "iteration": 1}
    engine.save_checkpoint(folder, tag="saved", client_state=info)
    if dist.get_rank() == 0:
        convert_to_universal(
            argparse.Namespace(input_folder=os.path.join(folder, "saved"),
                               output_folder=os.path.join(folder, UNIVERSAL),
                               num_extract_workers=1,
                               num_merge_workers=1,
                               keep_temp_folder=False,
                               strict=True,
                               inject_missing_state=False))
    dist.barrier()


def _partition(engine):
    """The masters and moments of this rank."""
    (flat, ) = engine.optimizer.fp32_partitioned_groups_flat
    state = engine.optimizer.optimizer.state[flat]
    return [flat.detach(), state["exp_avg"], state["exp_avg_sq"]]


class TestZeRO3UniversalRank(DistributedTest):
    world_size = 4

    @pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
    def test_ranks_of_all_nodes_load_their_own_partition(self, tmpdir, ranks_per_node):
        saved = _make_engine()
        _save_universal(saved, str(tmpdir))

        engine = _make_engine(load_universal=True)
        os.environ["LOCAL_RANK"] = str(dist.get_rank() % ranks_per_node)  # as the launcher sets it
        engine.load_checkpoint(str(tmpdir), tag=UNIVERSAL)

        for found, expected in zip(_partition(engine), _partition(saved)):
            assert torch.equal(found, expected)
