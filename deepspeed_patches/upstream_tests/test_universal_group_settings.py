# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import argparse
import logging
import os

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.checkpoint import DeepSpeedCheckpoint
from deepspeed.checkpoint.ds_to_universal import _save_optimizer_state
from deepspeed.utils import logger

from unit.common import DistributedTest

TAG = "step1"
SAVED = [{"lr": 0.5, "betas": (0.8, 0.9), "weight_decay": 0.125}, {"lr": 0.25, "betas": (0.7, 0.9), "weight_decay": 0}]
OTHERS = [{"lr": 0.125, "betas": (0.5, 0.6), "weight_decay": 0.25}] * 2


class OneTensorParallelRank:
    """What the load of a universal checkpoint asks Megatron for."""
    get_tensor_model_parallel_rank = staticmethod(lambda: 0)
    get_tensor_model_parallel_world_size = staticmethod(lambda: 1)
    get_slice_parallel_world_size = staticmethod(lambda: 1)


def _make_engine(settings, universal=False, grad_accum_dtype=None):
    """Each parameter is a param group of its own; one that has taken a step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    groups = [{"params": [param], **own} for param, own in zip(model.parameters(), settings)]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {
            "enabled": True
        },
        "data_types": {
            "grad_accum_dtype": grad_accum_dtype
        },
        "zero_optimization": {
            "stage": 1,
            "reduce_bucket_size": 1000
        },
        "checkpoint": {
            "load_universal": universal
        },
    }
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=config)[0]
    samples = torch.ones(1, 4, dtype=torch.bfloat16, device=engine.device)
    engine.backward(engine(samples).float().pow(2).mean())
    with torch.no_grad():  # the engine may gather the parameters into views, outside of it
        engine.step()
    return engine


def _save_universal_checkpoint(folder, groups=2):
    """Of what ds_to_universal writes what is loaded: the states by hand, the rest by its own function."""
    engine = _make_engine(SAVED)
    engine.save_checkpoint(folder, tag=TAG, client_state={"iteration": 1})
    if dist.get_rank() == 0:
        universal = os.path.join(folder, TAG)
        for name, param in engine.module.named_parameters():
            os.makedirs(os.path.join(universal, "zero", name))
            for key in ("fp32", "exp_avg", "exp_avg_sq"):
                torch.save({"param": torch.ones(param.shape)}, os.path.join(universal, "zero", name, f"{key}.pt"))
        for layer in range(4):  # of a pipeline, which the converter asks for
            torch.save({}, os.path.join(universal, f"layer_{layer:02d}-model_00-model_states.pt"))
        _save_optimizer_state(argparse.Namespace(output_folder=universal), DeepSpeedCheckpoint(universal))
        if groups < len(SAVED):
            path = os.path.join(universal, "zero", "optimizer_state.pt")
            saved = torch.load(path, weights_only=False)
            torch.save({**saved, "param_groups": saved.get("param_groups", [])[:groups]}, path)
    dist.barrier()


def _load(folder, grad_accum_dtype):
    engine = _make_engine(OTHERS, universal=True, grad_accum_dtype=grad_accum_dtype)
    params = [group["params"] for group in engine.optimizer.optimizer.param_groups]
    engine.optimizer.mpu = OneTensorParallelRank
    engine.load_checkpoint(folder, tag=TAG)
    groups = engine.optimizer.optimizer.param_groups
    assert all(group["params"] is own for group, own in zip(groups, params))
    return [{key: group[key] for key in SAVED[0]} for group in groups]


class Warnings(logging.Handler):

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


# The second is that of BF16_Optimizer.
@pytest.mark.parametrize("grad_accum_dtype", [None, "fp32"])
class TestUniversalGroupSettings(DistributedTest):
    world_size = 2

    def test_a_load_restores_the_settings(self, grad_accum_dtype, tmpdir):
        _save_universal_checkpoint(str(tmpdir))
        assert _load(str(tmpdir), grad_accum_dtype) == SAVED

    @pytest.mark.parametrize("groups", [0, 1])
    def test_a_load_says_that_the_settings_are_its_own(self, grad_accum_dtype, groups, tmpdir):
        _save_universal_checkpoint(str(tmpdir), groups)
        warnings = Warnings()
        logger.addHandler(warnings)

        assert _load(str(tmpdir), grad_accum_dtype) == OTHERS

        expected = f"has settings of {groups} param groups, and this run has 2"
        found = [message for message in warnings.messages if expected in message]
        assert len(found) == (1 if dist.get_rank() == 0 else 0)
