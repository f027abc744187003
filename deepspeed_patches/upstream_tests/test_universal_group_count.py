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


def _make_engine(stage, groups, universal=False):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    params = list(model.parameters())
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    config["zero_optimization"] = {"stage": stage, "reduce_bucket_size": 1000}
    config["checkpoint"] = {"load_universal": universal}
    param_groups = [{"params": params[i::groups]} for i in range(groups)]
    return deepspeed.initialize(model=model, optimizer=torch.optim.Adam(param_groups), config=config)[0]


def _save_universal_checkpoint(folder, stage, groups):
    engine = _make_engine(stage, groups)
    engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16, device=engine.device)).float().pow(2).mean())
    with torch.no_grad():  # the engine may gather the parameters into views, outside of it
        engine.step()
    info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}, "iteration": 1}
    engine.save_checkpoint(str(folder), tag=SAVED, client_state=info)
    if dist.get_rank() == 0:
        folders = {"input_folder": os.path.join(folder, SAVED), "output_folder": os.path.join(folder, UNIVERSAL)}
        convert_to_universal(argparse.Namespace(**folders, inject_missing_state=True, **OPTIONS))
    dist.barrier()


@pytest.mark.parametrize("stage", [1, 2])
class TestUniversalGroupCount(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize(("saved", "found"), [(1, 2), (2, 1)])
    def test_another_number_of_groups_is_refused(self, stage, saved, found, tmpdir):
        _save_universal_checkpoint(tmpdir, stage, saved)
        engine = _make_engine(stage, found, universal=True)
        with pytest.raises(ValueError, match=f"expected {saved} param groups.* found {found} in this run"):
            engine.load_checkpoint(str(tmpdir), tag=UNIVERSAL)
