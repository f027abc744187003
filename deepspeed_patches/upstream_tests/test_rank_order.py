# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import os

import torch
from deepspeed.checkpoint.ds_to_universal import _merge_zero_shards
from deepspeed.checkpoint.reshape_utils import get_zero_files

DP_SIZE = 102


def test_zero_files_are_in_the_order_of_the_ranks(tmp_path):
    names = [
        f"bf16_zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt" for dp_rank in range(DP_SIZE)
        for mp_rank in range(2)
    ]
    for name in reversed(names):
        (tmp_path / name).touch()
    assert [os.path.basename(path) for path in get_zero_files(str(tmp_path))] == names


def test_fragments_are_merged_in_the_order_of_the_ranks(tmp_path):
    (tmp_path / "0").mkdir()
    for dp_rank in reversed(range(DP_SIZE)):
        torch.save(torch.tensor([float(dp_rank)]), tmp_path / "0" / f"fp32.{dp_rank:0>2d}")
    (merged, ) = _merge_zero_shards(str(tmp_path), "fp32", 1, (DP_SIZE, ))
    assert torch.equal(merged, torch.arange(float(DP_SIZE)))
