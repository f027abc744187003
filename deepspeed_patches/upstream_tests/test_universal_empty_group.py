# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import argparse
import os
import shutil

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.checkpoint.ds_to_universal import main as convert_to_universal

from unit.common import DistributedTest

OPTIONS = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
TAG = "step2"
STATES = ("exp_avg", "exp_avg_sq")


class Scaled(torch.nn.Module):

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.linear(x) * self.scale


def _make_engine(groups, universal=False):
    """With the parameters of these names in param groups, each of another learning rate."""
    torch.manual_seed(0)
    model = Scaled()
    named = dict(model.named_parameters())
    param_groups = [{"params": [named[name] for name in names], "lr": 0.5**i} for i, names in enumerate(groups)]
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    config["zero_optimization"] = {"stage": 1, "reduce_bucket_size": 1000}
    config["checkpoint"] = {"load_universal": universal}
    return deepspeed.initialize(model=model, optimizer=torch.optim.Adam(param_groups), config=config)[0]


def _save_universal_checkpoint(folder):
    """Of two steps of a run in which every rank owns a part of every group."""
    engine = _make_engine([["linear.weight"], ["linear.bias", "scale"]])
    for _ in range(2):
        samples = torch.ones(1, 4, dtype=torch.bfloat16, device=engine.device)
        engine.backward(engine(samples).float().pow(2).mean())
        with torch.no_grad():  # the engine may gather the parameters into views, outside of it
            engine.step()
    info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}, "iteration": 2}
    engine.save_checkpoint(str(folder), tag="saved", client_state=info)
    if dist.get_rank() == 0:
        folders = {"input_folder": os.path.join(folder, "saved"), "output_folder": os.path.join(folder, TAG)}
        convert_to_universal(argparse.Namespace(**folders, inject_missing_state=True, **OPTIONS))


def _load(folder, elsewhere=None):
    """Into a run in which the second rank owns nothing of the last group, and knows its parameter by this name."""
    dist.barrier()
    engine = _make_engine([["linear.weight", "linear.bias"], ["scale"]], universal=True)
    if elsewhere and dist.get_rank() == 1:
        engine.optimizer.param_names[engine.module.scale] = elsewhere
    try:
        engine.load_checkpoint(str(folder), tag=TAG)
    except Exception:
        engine.optimizer.update_lp_params()  # the other rank waits for this one there
        raise
    return engine


def _state_of_last_group(engine):
    master = engine.optimizer.single_partition_of_fp32_groups[-1]
    return master, engine.optimizer.optimizer.state[master]


def _check_last_group(engine, folder):
    """The first rank has the only element and a padding, the second one padding alone."""
    master, state = _state_of_last_group(engine)
    assert set(state) == {"step", *STATES}
    for key, found in (("fp32", master), *((key, state[key]) for key in STATES)):
        expected = torch.zeros_like(found)
        if dist.get_rank() == 0:
            expected[0] = torch.load(os.path.join(folder, TAG, "zero", "scale", f"{key}.pt"))["param"].item()
            assert expected[0] != 0
        assert torch.equal(found, expected), key


class TestUniversalEmptyGroup(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("step", ["as saved", "a number"])
    def test_padding_is_at_the_step_of_its_group(self, step, tmpdir):
        _save_universal_checkpoint(tmpdir)
        if step == "a number" and dist.get_rank() == 0:
            for name in ("linear.weight", "linear.bias", "scale"):
                torch.save(2, os.path.join(tmpdir, TAG, "zero", name, "step.pt"))

        engine = _load(tmpdir)

        _check_last_group(engine, tmpdir)
        steps = [state["step"] for state in engine.optimizer.optimizer.state.values()]
        assert steps == [2, 2]
        assert [torch.is_tensor(found) for found in steps] == [step == "as saved"] * 2
        assert [group["lr"] for group in engine.optimizer.optimizer.param_groups] == [1.0, 0.5]

    def test_experts_that_other_ranks_own(self, tmpdir):
        """They are there by their numbers among all ranks, where the rank counts its own."""
        experts = "layer.deepspeed_moe.experts.deepspeed_experts."
        _save_universal_checkpoint(tmpdir)
        if dist.get_rank() == 0:
            zero = os.path.join(tmpdir, TAG, "zero")
            shutil.copytree(os.path.join(zero, "scale"), os.path.join(zero, f"{experts}global_1.weight"))

        engine = _load(tmpdir, elsewhere=f"{experts}1.weight")

        _check_last_group(engine, tmpdir)
        assert _state_of_last_group(engine)[1]["step"] == 2
