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
from deepspeed.pipe import PipelineModule

from unit.common import DistributedTest

OPTIONS = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
SAVED, UNIVERSAL = "saved", "universal"
INFO = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}, "iteration": 1}


def _save_two_stages(folder, weight_decays):
    stage = dist.get_rank()
    torch.manual_seed(0)
    model = PipelineModule(layers=[torch.nn.Linear(4, 4) for _ in range(4)],
                           num_stages=2,
                           loss_fn=torch.nn.MSELoss(),
                           partition_method="uniform",
                           activation_checkpoint_interval=0)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "steps_per_print": 10}
    config["fp16"] = {"enabled": True, "initial_scale_power": 4}
    config["zero_optimization"] = {"stage": 1, "reduce_bucket_size": 1000}
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=weight_decays[stage])
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    samples = torch.ones((1, 4), dtype=torch.float16, device=engine.device)
    engine.train_batch(iter([(samples, samples)] * 2))
    engine.save_checkpoint(str(folder), tag=SAVED, client_state=INFO)


def _convert(folder):
    folders = {"input_folder": os.path.join(folder, SAVED), "output_folder": os.path.join(folder, UNIVERSAL)}
    convert_to_universal(argparse.Namespace(**folders, inject_missing_state=False, **OPTIONS))


class TestUniversalStageSettings(DistributedTest):
    world_size = 2

    def test_stages_with_other_settings_are_refused(self, tmpdir):
        _save_two_stages(tmpdir, [0.0, 0.1])
        if dist.get_rank() == 0:
            with pytest.raises(ValueError, match=r"weight_decay.* of param group 0 differ from the first"):
                _convert(tmpdir)
            assert not os.path.exists(os.path.join(tmpdir, UNIVERSAL))
        dist.barrier()
