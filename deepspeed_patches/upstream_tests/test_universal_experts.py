# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import os

import pytest
import torch
from deepspeed.checkpoint import enable_universal_checkpoint
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.utils import groups
from deepspeed.utils.tensor_fragment import get_hp_fragment_mapping

EXPERTS = "layer.deepspeed_moe.experts.deepspeed_experts."
NAME = "ep_size_2"


class OptimizerOfARankWithExperts(ZeROOptimizer):
    """The dense group, and two groups of an expert each: of four experts this is the rank that has the last two."""

    def __init__(self):
        self.mpu = None
        self.lp_groups, self.param_names, self.partitions, groups = [], {}, [], []
        for name in ("dense", f"{EXPERTS}0.weight", f"{EXPERTS}1.weight"):
            lp, partition = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
            lp._hp_mapping = get_hp_fragment_mapping(lp, 0, partition, {}, {}, False, 0, 0, 2)
            enable_universal_checkpoint([lp])
            group = {"params": [partition], "name": name}
            if name != "dense":
                lp.group_name = NAME
                group.update(moe=True, name=NAME)
            self.lp_groups.append([lp])
            self.param_names[lp] = name
            self.partitions.append(partition)
            groups.append(group)
        self.optimizer = torch.optim.Adam(groups)

    def _load_global_state(self, sd):
        pass

    def load(self, folder):
        self.load_hp_checkpoint_state_from_checkpoint_dir("lp_groups", str(folder))
        return [partition.tolist() for partition in self.partitions]


@pytest.fixture
def optimizer(monkeypatch):
    monkeypatch.setattr(groups, "_get_expert_parallel_rank", {NAME: 1}.__getitem__)
    return OptimizerOfARankWithExperts()


def _write_checkpoint(folder, mark, rates=(0.25, 0.25)):
    """The part of what ds_to_universal writes that is loaded here, of groups of experts with these learning rates."""
    for name, value in [("dense", 9.0), *((f"{EXPERTS}{mark}{number}.weight", float(number)) for number in range(4))]:
        os.makedirs(folder / "zero" / name)
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            torch.save({"param": torch.full((2, ), value)}, folder / "zero" / name / f"{state}.pt")
    saved = [{"lr": 0.5, "moe": False, "name": "dense", "params": [0]}]
    saved += [{"lr": rate, "moe": True, "name": "ep_size_4", "params": [0]} for rate in rates]
    torch.save({"param_groups": saved}, folder / "zero" / "optimizer_state.pt")


@pytest.mark.parametrize("mark", ["global_", ""], ids=["saved by several ranks", "saved by one rank"])
@pytest.mark.parametrize("rates", [(0.25, 0.125), (0.25, ), (0.25, 0.25, 0.25)])
def test_experts_are_loaded_by_their_numbers_among_all_ranks(optimizer, mark, rates, tmp_path):
    rates_of_experts = rates if len(rates) == 2 else (0.25, 0.25)
    _write_checkpoint(tmp_path, mark, rates)
    assert optimizer.load(tmp_path) == [[9.0, 9.0], [2.0, 2.0], [3.0, 3.0]]
    loaded = optimizer.optimizer.param_groups
    assert tuple(group["lr"] for group in loaded) == (0.5, *rates_of_experts)
    assert [group["name"] for group in loaded] == ["dense", NAME, NAME]


@pytest.mark.parametrize("mark", ["global_", ""])
def test_a_missing_expert_is_named(optimizer, mark, tmp_path):
    _write_checkpoint(tmp_path, mark)
    os.rename(tmp_path / "zero" / f"{EXPERTS}{mark}3.weight", tmp_path / "zero" / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"deepspeed_experts\.global_3\.weight"):
        optimizer.load(tmp_path)


def test_groups_of_other_settings_are_not_guessed(optimizer, tmp_path):
    _write_checkpoint(tmp_path, "global_", rates=(0.25, 0.25, 0.125))
    with pytest.raises(ValueError, match="expected 3 param groups of experts, of different settings, and 1 others"):
        optimizer.load(tmp_path)
