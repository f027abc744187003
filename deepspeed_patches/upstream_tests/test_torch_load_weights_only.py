# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import argparse
import collections
import os
import pickle

import pytest
import torch
from deepspeed.checkpoint import DeepSpeedCheckpoint
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import zero_to_fp32
from deepspeed.utils.tensor_fragment import fragment_address

pytestmark = pytest.mark.skipif(
    not hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"),
    reason="before torch 2.6 torch.load takes every class",
)


@pytest.fixture(params=[LossScaler(scale=8), DynamicLossScaler(init_scale=8)], ids=["static", "dynamic"])
def checkpoint_dir(request, tmp_path):
    optim_sd = {
        "loss_scaler": request.param,
        "zero_stage": ZeroStageEnum.gradients,
        "base_optimizer_state": {
            "state": {
                0: {
                    "exp_avg": torch.ones(4)
                }
            },
            "param_groups": [{
                "params": [0]
            }]
        },
        "single_partition_of_fp32_groups": [torch.arange(4.0)],
        "group_paddings": [0],
        "partition_count": [1],
        "param_slice_mappings": [{
            "weight": fragment_address(numel=4, start=0)
        }],
    }
    torch.save({"optimizer_state_dict": optim_sd}, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    model_sd = {
        "args": argparse.Namespace(lr=0.1),
        "iteration": 2,
        "param_shapes": [{
            "weight": torch.Size([4])
        }],
    }
    torch.save(model_sd, tmp_path / "mp_rank_00_model_states.pt")
    for layer in range(4):
        torch.save({}, tmp_path / f"layer_{layer:02d}-model_00-model_states.pt")
    return str(tmp_path)


def _optim_file(checkpoint_dir):
    return os.path.join(checkpoint_dir, "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def test_checkpoint_engine_loads_what_deepspeed_writes(checkpoint_dir):
    allowed = set(torch.serialization.get_safe_globals())
    engine = TorchCheckpointEngine()
    optim_sd = engine.load(_optim_file(checkpoint_dir), map_location="cpu")["optimizer_state_dict"]
    assert optim_sd["loss_scaler"].loss_scale == 8
    assert optim_sd["zero_stage"] is ZeroStageEnum.gradients
    assert optim_sd["param_slice_mappings"] == [{"weight": fragment_address(numel=4, start=0)}]

    assert set(torch.serialization.get_safe_globals()) == allowed


def test_checkpoint_is_read_for_conversion(checkpoint_dir):
    ds_checkpoint = DeepSpeedCheckpoint(checkpoint_dir)
    assert ds_checkpoint.get_args() == argparse.Namespace(lr=0.1)
    sd = ds_checkpoint.get_zero_checkpoint_state(pp_index=0, tp_index=0, dp_index=0)
    assert sd["optimizer_state_dict"]["param_slice_mappings"][0]["weight"].numel == 4


def test_zero_to_fp32_reads_optimizer_states(checkpoint_dir):
    zero_stage, world_size, fp32_groups = zero_to_fp32.parse_optim_states([_optim_file(checkpoint_dir)],
                                                                          checkpoint_dir)
    assert (zero_stage, world_size) == (2, 1)
    assert torch.equal(fp32_groups[0][0], torch.arange(4.0))


class _Attack:

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return exec, (f"open({self.marker!r}, 'w')", )


def test_other_classes_are_refused_and_named(tmp_path):
    path, marker = str(tmp_path / "mp_rank_00_model_states.pt"), str(tmp_path / "ran")
    torch.save({"client": collections.deque([1]), "attack": _Attack(marker)}, path)
    with pytest.raises(pickle.UnpicklingError) as error:
        TorchCheckpointEngine().load(path)
    assert all(part in str(error.value) for part in (path, "builtins.exec", "collections.deque"))
    assert not os.path.exists(marker)
