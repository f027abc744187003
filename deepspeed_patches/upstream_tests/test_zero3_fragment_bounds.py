# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import argparse
import math
import os
from collections import OrderedDict

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal

DP_SIZE = 8
STATES = ("fp32", "exp_avg", "exp_avg_sq")


def _write_checkpoint(folder, params):
    """Every rank holds ceil(numel / dp) elements of every parameter; zeros where that is past the parameter's end."""
    shards = {}
    for state in STATES:
        rows = []
        for param in params.values():
            partition = math.ceil(param[state].numel() / DP_SIZE)
            padded = torch.nn.functional.pad(param[state], (0, partition * DP_SIZE - param[state].numel()))
            rows.append(padded.view(DP_SIZE, partition))
        shards[state] = torch.cat(rows, dim=1)

    os.makedirs(folder)
    param_shapes = [OrderedDict((name, param["fp32"].shape) for name, param in params.items())]
    for rank in range(DP_SIZE):
        fp32, exp_avg, exp_avg_sq = (shards[state][rank].clone() for state in STATES)
        optim_sd = {
            "zero_stage": 3,
            "fp32_flat_groups": [fp32],
            "optimizer_state_dict": {
                "state": {
                    0: {
                        "step": 2,
                        "exp_avg": exp_avg,
                        "exp_avg_sq": exp_avg_sq
                    }
                },
                "param_groups": [{
                    "params": [0]
                }],
            },
        }
        prefix = os.path.join(folder, f"zero_pp_rank_{rank}_mp_rank_00")
        torch.save({"optimizer_state_dict": optim_sd}, f"{prefix}_optim_states.pt")
        torch.save({"param_shapes": param_shapes, "universal_checkpoint_info": {}}, f"{prefix}_model_states.pt")


@pytest.mark.parametrize("numel", [1, 3, 8, 9, 11, 16, 17])
def test_ranks_past_the_end_hold_nothing(tmp_path, numel):
    params = {
        name: {
            state: torch.arange(1.0, n + 1) + 100 * i
            for i, state in enumerate(STATES)
        }
        for name, n in (("weight", numel), ("bias", 5))
    }
    _write_checkpoint(str(tmp_path / "step2"), params)

    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(tmp_path / "step2"),
            output_folder=str(tmp_path / "universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=False,
        ))

    for name, param in params.items():
        for state, expected in param.items():
            converted = torch.load(tmp_path / "universal" / "zero" / name / f"{state}.pt")
            assert torch.equal(converted, expected)
