# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import os

import deepspeed
import deepspeed.comm as dist
import pytest
import torch

from unit.common import DistributedTest

VALUES = {"fp32": 1.0, "exp_avg": 2.0, "exp_avg_sq": 3.0}
ITERATION = 2
TAG = "step2"


class OneTensorParallelRank:
    """What the load of a universal checkpoint asks Megatron for."""
    get_tensor_model_parallel_rank = staticmethod(lambda: 0)
    get_tensor_model_parallel_world_size = staticmethod(lambda: 1)
    get_slice_parallel_world_size = staticmethod(lambda: 1)


def _make_engine(optimizer, universal):
    """Each parameter is a param group of its own, of which every rank has a half."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    adam = torch.optim.AdamW([{"params": [param]} for param in model.parameters()], lr=1.0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {
            "enabled": True
        },
        "data_types": {
            "grad_accum_dtype": "fp32" if optimizer == "BF16_Optimizer" else "bf16"
        },
        "zero_optimization": {
            "stage": 1,
            "reduce_bucket_size": 1000
        },
        "checkpoint": {
            "load_universal": universal
        },
    }
    return deepspeed.initialize(model=model, optimizer=adam, config=config)[0]


def _train(engine, steps):
    for _ in range(steps):
        samples = torch.ones(1, 4, dtype=torch.bfloat16, device=engine.device)
        engine.backward(engine(samples).float().pow(2).mean())
        with torch.no_grad():  # the engine may gather the parameters into views, outside of it
            engine.step()


def _save_universal_checkpoint(folder, optimizer):
    """Of what ds_to_universal writes the part that is loaded; a state is the same number in all of a parameter."""
    engine = _make_engine(optimizer, universal=False)
    _train(engine, ITERATION)
    engine.save_checkpoint(str(folder), tag=TAG, client_state={"iteration": ITERATION})
    if dist.get_rank() == 0:
        zero = os.path.join(folder, TAG, "zero")
        for i, (name, param) in enumerate(engine.module.named_parameters()):
            os.makedirs(os.path.join(zero, name))
            for key, value in VALUES.items():
                state = torch.full(param.shape, value + 10 * i)
                torch.save({"param": state}, os.path.join(zero, name, f"{key}.pt"))
        torch.save({"ds_version": deepspeed.__version__}, os.path.join(zero, "optimizer_state.pt"))
    dist.barrier()


class TestUniversalAllMoments(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("optimizer", ["stage 1", "BF16_Optimizer"])
    @pytest.mark.parametrize("stepped", [False, True])
    def test_loads_the_states_of_every_group(self, optimizer, stepped, tmpdir):
        _save_universal_checkpoint(tmpdir, optimizer)
        engine = _make_engine(optimizer, universal=True)
        _train(engine, 3 if stepped else 0)

        inner = engine.optimizer.optimizer
        grads = [group["params"][0].grad for group in inner.param_groups]

        engine.optimizer.mpu = OneTensorParallelRank
        engine.load_checkpoint(str(tmpdir), tag=TAG)

        for i, group in enumerate(inner.param_groups):
            (master, ) = group["params"]
            state = inner.state[master]
            assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
            for key, value in VALUES.items():
                found = master if key == "fp32" else state[key]
                assert torch.equal(found, torch.full_like(found, value + 10 * i)), (i, key)
            assert master.grad is grads[i]
        assert [state["step"] for state in inner.state.values()] == [ITERATION] * 2
        weights = [weight.unique().tolist() for weight in engine.module.parameters()]
        assert weights == [[VALUES["fp32"]], [VALUES["fp32"] + 10]]
