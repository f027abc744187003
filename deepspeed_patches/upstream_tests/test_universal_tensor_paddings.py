# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import os
from collections import OrderedDict

import pytest
import torch
from deepspeed.checkpoint import DeepSpeedCheckpoint, ds_to_universal
from deepspeed.utils.tensor_fragment import fragment_address

DP_SIZE = 8
NUMEL = 11
# Padded to a multiple of 2 * DP_SIZE. The padding reaches over the last ranks, and is recorded on the last one alone.
PADDED_NUMEL = 16
PARTITION_NUMEL = PADDED_NUMEL // DP_SIZE
PADDING = PADDED_NUMEL - NUMEL


@pytest.fixture
def flat_states():
    states = {}
    for i, name in enumerate(("fp32", "exp_avg", "exp_avg_sq")):
        state = torch.arange(1.0, NUMEL + 1) + 100 * i
        states[name] = torch.nn.functional.pad(state, (0, PADDED_NUMEL - NUMEL))
    return states


@pytest.fixture
def checkpoint_dir(tmp_path, flat_states):
    for rank in range(DP_SIZE):
        begin = rank * PARTITION_NUMEL
        shard = {name: state.narrow(0, begin, PARTITION_NUMEL).clone() for name, state in flat_states.items()}
        numel = max(0, min(PARTITION_NUMEL, NUMEL - begin))
        fragments = OrderedDict(weight=fragment_address(numel=numel, start=0)) if numel > 0 else OrderedDict()
        optim_sd = {
            "base_optimizer_state": {
                "state": {
                    0: {
                        "step": torch.tensor(2.0),
                        "exp_avg": shard["exp_avg"],
                        "exp_avg_sq": shard["exp_avg_sq"]
                    }
                },
                "param_groups": [{
                    "params": [0]
                }],
            },
            "single_partition_of_fp32_groups": [shard["fp32"]],
            "zero_stage": 1,
            "group_paddings": [PADDING if rank == DP_SIZE - 1 else 0],
            "partition_count": [DP_SIZE],
            "param_slice_mappings": [fragments],
        }
        path = os.path.join(tmp_path, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        torch.save({"optimizer_state_dict": optim_sd}, path)

    model_sd = {"param_shapes": [OrderedDict(weight=torch.Size([NUMEL]))], "iteration": 2}
    model_sd["universal_checkpoint_info"] = {"universal_checkpoint_version": 0.2}
    torch.save(model_sd, os.path.join(tmp_path, "mp_rank_00_model_states.pt"))
    for layer in range(4):
        torch.save({}, os.path.join(tmp_path, f"layer_{layer:02d}-model_00-model_states.pt"))
    return str(tmp_path)


def _exp_avg(ds_checkpoint, dp_index):
    sd = ds_checkpoint.zero_checkpoint.get_state_for_rank(pp_index=0, tp_index=0, dp_index=dp_index)
    return sd["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"]


def test_extracts_every_fragment(checkpoint_dir, flat_states, tmp_path):
    ds_checkpoint = DeepSpeedCheckpoint(checkpoint_dir)
    temp_dir = str(tmp_path / "fragments")
    for dp_index in range(DP_SIZE):
        ds_to_universal.extract_zero_shards(temp_dir, ds_checkpoint, (0, 0, dp_index))

    for name, state in flat_states.items():
        files = [os.path.join(temp_dir, "weight", "0", f"{name}.{rank:02d}") for rank in range(DP_SIZE)]
        fragments = [torch.load(file) for file in files if os.path.exists(file)]
        assert torch.equal(torch.cat(fragments), state[:NUMEL])


def test_strips_at_most_the_partition(checkpoint_dir, flat_states):
    ds_checkpoint = DeepSpeedCheckpoint(checkpoint_dir)
    assert _exp_avg(ds_checkpoint, DP_SIZE - 1).numel() == 0
    assert torch.equal(_exp_avg(ds_checkpoint, 0), flat_states["exp_avg"][:PARTITION_NUMEL])
