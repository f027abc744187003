# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import os

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from unit.common import DistributedTest

TAG = "step3"
STEP_AT_SET_UP = 1  # which every optimizer takes
SAVED_STEP = 3 - 1 + STEP_AT_SET_UP


class OneTensorParallelRank:
    """What the load of a universal checkpoint asks Megatron for."""
    get_tensor_model_parallel_rank = staticmethod(lambda: 0)
    get_tensor_model_parallel_world_size = staticmethod(lambda: 1)
    get_slice_parallel_world_size = staticmethod(lambda: 1)


def _make_engine(seed, universal):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 4)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {
            "enabled": True,
            "loss_scale": 16
        },
        "zero_optimization": {
            "stage": 1,
            "reduce_bucket_size": 1000
        },
        "checkpoint": {
            "load_universal": universal
        },
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.optimizer.mpu = OneTensorParallelRank
    return engine


def _train(engine, *values):
    """A step for each value of the samples; it is skipped where that is infinite."""
    losses = []
    for value in values:
        samples = torch.full((1, 4), value, dtype=torch.float16, device=engine.device)
        loss = engine(samples).float().pow(2).mean()
        engine.backward(loss)
        with torch.no_grad():  # the engine may gather the parameters into views, outside of it
            engine.step()
        losses.append(loss.item())
    return losses


def _save_universal_checkpoint(folder):
    """Of three steps, one of which was skipped; of what ds_to_universal writes the part that is loaded."""
    engine = _make_engine(seed=0, universal=False)
    _train(engine, 1.0, float("inf"), 2.0)
    assert (engine.global_steps, engine.skipped_steps) == (3, 1)
    engine.save_checkpoint(str(folder), tag=TAG)
    zero = os.path.join(folder, TAG, "zero")
    for name, param in engine.module.named_parameters():
        states = {key: safe_get_full_optimizer_state(param, key) for key in ("exp_avg", "exp_avg_sq")}
        states["fp32"] = safe_get_full_fp32_param(param)
        if dist.get_rank() == 0:
            os.makedirs(os.path.join(zero, name))
            for key, state in states.items():
                torch.save({"param": state.clone()}, os.path.join(zero, name, f"{key}.pt"))
    if dist.get_rank() == 0:
        torch.save({"ds_version": deepspeed.__version__}, os.path.join(zero, "optimizer_state.pt"))
    dist.barrier()
    return engine


def _set_as_fused_optimizers_have_it(engine):
    """The step as a number, in the param group as well."""
    inner = engine.optimizer.optimizer
    for state in [*inner.param_groups, *inner.state.values()]:
        state["step"] = STEP_AT_SET_UP


def _steps(engine):
    inner = engine.optimizer.optimizer
    return [state["step"] for state in [*inner.param_groups, *inner.state.values()] if "step" in state]


class TestUniversalStep(DistributedTest):
    world_size = 2

    def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(self, tmpdir):
        saved = _save_universal_checkpoint(tmpdir)
        engine = _make_engine(seed=1, universal=True)
        engine.load_checkpoint(str(tmpdir), tag=TAG)
        assert _steps(engine) == _steps(saved) == [SAVED_STEP]
        assert _train(engine, 3.0, 4.0) == _train(saved, 3.0, 4.0)

    def test_a_second_load_sets_the_step_again(self, tmpdir):
        _save_universal_checkpoint(tmpdir)
        engine = _make_engine(seed=1, universal=True)
        for _ in range(2):
            engine.load_checkpoint(str(tmpdir), tag=TAG)
            assert _steps(engine) == [SAVED_STEP]
            _train(engine, 3.0)

    def test_steps_of_fused_optimizers(self, tmpdir):
        _save_universal_checkpoint(tmpdir)
        engine = _make_engine(seed=1, universal=True)
        _set_as_fused_optimizers_have_it(engine)
        engine.load_checkpoint(str(tmpdir), tag=TAG)
        assert _steps(engine) == [SAVED_STEP] * 2
        assert not any(torch.is_tensor(step) for step in _steps(engine))

    @pytest.mark.parametrize("fused", [False, True])
    def test_a_load_of_the_weights_alone_sets_none(self, fused, tmpdir):
        _save_universal_checkpoint(tmpdir)
        engine = _make_engine(seed=1, universal=True)
        if fused:
            _set_as_fused_optimizers_have_it(engine)
        engine.load_checkpoint(str(tmpdir), tag=TAG, load_optimizer_states=False)
        assert _steps(engine) == [STEP_AT_SET_UP] * (2 if fused else 1)
