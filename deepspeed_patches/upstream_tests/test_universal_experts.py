# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import os

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

from unit.common import DistributedTest

EXPERTS = "experts.deepspeed_moe.experts.deepspeed_experts."
NAME = "ep_size_2"
TAG = "step1"
DENSE = 9.0


class OneLayerOfExperts(torch.nn.Module):

    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(4, 4)
        self.experts = MoE(4, torch.nn.Linear(4, 4, bias=False), num_experts=4, ep_size=2, min_capacity=0)

    def forward(self, x):
        return self.experts(self.dense(x))[0]


def _make_engine(universal):
    """The dense group, and two groups of an expert each: of four experts a rank has two."""
    torch.manual_seed(0)
    model = OneLayerOfExperts()
    dense = {"params": list(model.parameters()), "name": "dense"}
    groups = split_params_into_different_moe_groups_for_optimizer(dense, max_group_size=16)
    config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}}
    config["zero_optimization"] = {"stage": 1, "reduce_bucket_size": 1000}
    config["checkpoint"] = {"load_universal": universal}
    return deepspeed.initialize(model=model, optimizer=torch.optim.Adam(groups, lr=1.0), config=config)[0]


def _save_universal_checkpoint(folder, mark="global_", rates=(0.25, 0.25), missing=()):
    """Of groups of experts with these learning rates; of what ds_to_universal writes the part that is loaded.

    Every state of an expert's weight is its number among all.
    """
    engine = _make_engine(universal=False)
    samples = torch.ones(4, 4, dtype=torch.bfloat16, device=engine.device)
    engine.backward(engine(samples).float().mean())
    with torch.no_grad():  # the engine may gather the parameters into views, outside of it
        engine.step()
    engine.save_checkpoint(str(folder), tag=TAG)
    if dist.get_rank() == 0:
        zero = os.path.join(folder, TAG, "zero")
        dense = {n: torch.full(p.shape, DENSE) for n, p in engine.module.named_parameters() if EXPERTS not in n}
        experts = {f"{EXPERTS}{mark}{n}.weight": torch.full((4, 4), float(n)) for n in range(4) if n not in missing}
        for name, value in {**dense, **experts}.items():
            os.makedirs(os.path.join(zero, name))
            for state in ("fp32", "exp_avg", "exp_avg_sq"):
                torch.save({"param": value}, os.path.join(zero, name, f"{state}.pt"))
        groups = [{"lr": 0.5, "moe": False, "name": "dense", "params": [0]}]
        groups += [{"lr": rate, "moe": True, "name": "ep_size_4", "params": [0]} for rate in rates]
        torch.save({
            "ds_version": deepspeed.__version__,
            "param_groups": groups
        }, os.path.join(zero, "optimizer_state.pt"))
    dist.barrier()


def _load(folder):
    engine = _make_engine(universal=True)
    engine.load_checkpoint(str(folder), tag=TAG)
    return engine


class TestUniversalExperts(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("mark", ["global_", ""], ids=["saved by several ranks", "saved by one rank"])
    @pytest.mark.parametrize("rates", [(0.25, 0.125), (0.25, ), (0.25, 0.25, 0.25)])
    def test_experts_are_loaded_by_their_numbers_among_all_ranks(self, mark, rates, tmpdir):
        _save_universal_checkpoint(tmpdir, mark, rates)

        engine = _load(tmpdir)

        numbers = [2.0 * dist.get_rank(), 2.0 * dist.get_rank() + 1]
        masters = engine.optimizer.single_partition_of_fp32_groups
        for master, value in zip(masters, [DENSE, *numbers]):
            state = engine.optimizer.optimizer.state[master]
            for found in (master, state["exp_avg"], state["exp_avg_sq"]):
                assert torch.equal(found, torch.full_like(found, value))
        weights = [param for name, param in engine.module.named_parameters() if EXPERTS in name]
        assert [weight.unique().tolist() for weight in weights] == [[number] for number in numbers]
        groups = engine.optimizer.optimizer.param_groups
        rates_of_experts = rates if len(rates) == 2 else (0.25, 0.25)
        assert [group["lr"] for group in groups] == [0.5, *rates_of_experts]
        assert [group["name"] for group in groups] == ["dense", NAME, NAME]

    @pytest.mark.parametrize("mark", ["global_", ""])
    def test_a_missing_expert_is_named(self, mark, tmpdir):
        _save_universal_checkpoint(tmpdir, mark, missing=(1, 3))
        number = 2 * dist.get_rank() + 1
        with pytest.raises(FileNotFoundError, match=rf"deepspeed_experts\.global_{number}\.weight"):
            _load(tmpdir)

    def test_groups_of_other_settings_are_not_guessed(self, tmpdir):
        _save_universal_checkpoint(tmpdir, rates=(0.25, 0.25, 0.125))
        expected = "expected 3 param groups of experts, of different settings, and 1 others"
        with pytest.raises(ValueError, match=expected):
            _load(tmpdir)
