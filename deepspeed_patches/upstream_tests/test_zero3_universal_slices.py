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
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

from unit.common import DistributedTest

SAVED, UNIVERSAL = "saved", "universal"


def _save(folder, tp_size):
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=tp_size, num_dp=dist.get_world_size() // tp_size)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {
            "enabled": True
        },
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 1000
        },
    }
    engine = deepspeed.initialize(model=model,
                                  optimizer=torch.optim.AdamW(model.parameters()),
                                  config=config,
                                  mpu=PipelineParallelGrid(topology=topology))[0]
    engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16, device=engine.device)).float().pow(2).mean())
    with torch.no_grad():  # the engine may gather the parameters into views, outside of it
        engine.step()
    info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}, "iteration": 1}
    engine.save_checkpoint(str(folder), tag=SAVED, client_state=info)


def _convert(folder):
    convert_to_universal(
        argparse.Namespace(input_folder=os.path.join(folder, SAVED),
                           output_folder=os.path.join(folder, UNIVERSAL),
                           num_extract_workers=1,
                           num_merge_workers=1,
                           keep_temp_folder=False,
                           strict=True,
                           inject_missing_state=False))


class TestZeRO3UniversalSlices(DistributedTest):
    world_size = 2

    def test_several_tensor_parallel_ranks_are_refused(self, tmpdir):
        _save(tmpdir, tp_size=2)
        if dist.get_rank() == 0:
            with pytest.raises(NotImplementedError, match="found model states of 2 tensor-parallel ranks"):
                _convert(tmpdir)
            assert not os.path.exists(os.path.join(tmpdir, UNIVERSAL))
        dist.barrier()

    def test_data_parallel_ranks_are_converted(self, tmpdir):
        _save(tmpdir, tp_size=1)
        if dist.get_rank() == 0:
            _convert(tmpdir)
            assert os.path.isfile(os.path.join(tmpdir, UNIVERSAL, "zero", "weight", "fp32.pt"))
        dist.barrier()
