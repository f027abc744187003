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
UNIVERSAL = "universal"


def _make_engine(words, load_universal=False):
    torch.manual_seed(words)
    model = torch.nn.Sequential(torch.nn.Linear(words, 4), torch.nn.Linear(4, 4))
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    config["zero_optimization"] = {"stage": 3}
    config["checkpoint"] = {"load_universal": load_universal}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _save_universal(engine, folder, words):
    samples = torch.ones((1, words), dtype=torch.bfloat16, device=engine.device)
    engine.backward(engine(samples).float().pow(2).mean())
    engine.step()
    info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}, "iteration": 1}
    engine.save_checkpoint(folder, tag="saved", client_state=info)
    if dist.get_rank() == 0:
        folders = {"input_folder": os.path.join(folder, "saved"), "output_folder": os.path.join(folder, UNIVERSAL)}
        convert_to_universal(argparse.Namespace(**folders, inject_missing_state=False, **OPTIONS))
    dist.barrier()


class TestZeRO3UniversalSizes(DistributedTest):
    world_size = 2

    def test_a_parameter_of_another_size_is_refused(self, tmpdir):
        _save_universal(_make_engine(words=4), str(tmpdir), words=4)

        engine = _make_engine(words=6, load_universal=True)
        with pytest.raises(ValueError, match=r"0\.weight has another size"):
            engine.load_checkpoint(str(tmpdir), tag=UNIVERSAL)
