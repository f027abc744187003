# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import argparse
import glob
import os

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.checkpoint.constants import (PARAMETER_WITH_SUB_PARAMS, UNIVERSAL_CHECKPOINT_INFO)
from deepspeed.checkpoint.ds_to_universal import main as convert_to_universal

from unit.common import DistributedTest

TP_SIZE = 2
FUSED = 3
HIDDEN = 4
UNIVERSAL = "universal"


class _FusedModel(torch.nn.Module):

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(HIDDEN, FUSED * HIDDEN)
        self.out = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(FUSED, dim=-1)
        return self.out(q * torch.tanh(k) + v)


def _make_engine(seed, load_universal=False):
    torch.manual_seed(seed)
    model = _FusedModel()
    layer_specs = [{
        "patterns": [r".*qkv\.weight$"],
        "partition_type": "column",
        "shape": [FUSED, -1],
        "partition_dim": 0
    }, {
        "patterns": [r".*out\.weight$"],
        "partition_type": "row"
    }]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {
            "autotp_size": TP_SIZE,
            "partition_config": {
                "use_default_specs": False,
                "layer_specs": layer_specs
            }
        },
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": 0.1,
                "torch_adam": True
            }
        },
        "bf16": {
            "enabled": True
        },
        "zero_optimization": {
            "stage": 1
        },
        "checkpoint": {
            "load_universal": load_universal
        }
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def _train_and_save(folder):
    engine = _make_engine(seed=0)
    samples = torch.arange(HIDDEN, dtype=torch.bfloat16, device=engine.device).view(1, HIDDEN)
    engine.backward(engine(samples).float().pow(2).mean())
    engine.step()
    engine.save_checkpoint(folder, tag="saved", client_state={"iteration": 1})
    dist.barrier()
    return engine


def _convert(folder):
    convert_to_universal(
        argparse.Namespace(input_folder=os.path.join(folder, "saved"),
                           output_folder=os.path.join(folder, UNIVERSAL),
                           num_extract_workers=1,
                           num_merge_workers=1,
                           keep_temp_folder=False,
                           strict=True,
                           inject_missing_state=False))


def _states(engine):
    """The masters and moments of this rank, which shares its shards with no other, by parameter."""
    optimizer = engine.optimizer
    names = {param: name for name, param in engine.module.named_parameters()}
    states = {}
    for flat, params in zip(optimizer.single_partition_of_fp32_groups, optimizer.round_robin_bit16_groups):
        own = optimizer.optimizer.state[flat]
        for key, value in (("fp32", flat.detach()), ("exp_avg", own["exp_avg"]), ("exp_avg_sq", own["exp_avg_sq"])):
            offset = 0
            for param in params:
                states[names[param], key] = value[offset:offset + param.numel()].view(param.shape).cpu().clone()
                offset += param.numel()
    return states


class TestAutoTPFusedWidths(DistributedTest):
    world_size = TP_SIZE

    def test_a_fused_layer_is_converted_and_loaded_in_its_order(self, tmpdir):
        folder = str(tmpdir)
        saved = _states(_train_and_save(folder))
        if dist.get_rank() == 0:
            _convert(folder)
        dist.barrier()

        by_rank = [None] * TP_SIZE
        dist.all_gather_object(by_rank, saved)
        for name in ("qkv.weight", "qkv.bias"):
            for key in ("fp32", "exp_avg", "exp_avg_sq"):
                shards = [states[name, key].chunk(FUSED) for states in by_rank]
                expected = torch.cat([shard[part] for part in range(FUSED) for shard in shards])
                found = torch.load(os.path.join(folder, UNIVERSAL, "zero", name, f"{key}.pt"), weights_only=False)
                assert torch.equal(found["param"].flatten(), expected.flatten()), (name, key)

        engine = _make_engine(seed=1, load_universal=True)
        engine.load_checkpoint(folder, tag=UNIVERSAL)
        loaded = _states(engine)
        assert [name for name, value in saved.items() if not torch.equal(loaded[name], value)] == []

    def test_a_bias_that_the_checkpoint_does_not_describe_is_refused(self, tmpdir):
        folder = str(tmpdir)
        _train_and_save(folder)
        if dist.get_rank() == 0:
            for path in glob.glob(os.path.join(folder, "saved", "mp_rank_*")):
                state = torch.load(path, weights_only=False)
                info = state[UNIVERSAL_CHECKPOINT_INFO]
                described = info[PARAMETER_WITH_SUB_PARAMS]
                info[PARAMETER_WITH_SUB_PARAMS] = [entry for entry in described if "weight" in entry["patterns"][0]]
                torch.save(state, path)
            with pytest.raises(ValueError, match=r"does not state how qkv\.bias is cut"):
                _convert(folder)
        dist.barrier()
