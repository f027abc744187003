# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import os

import pytest
import torch
from deepspeed.checkpoint import enable_universal_checkpoint
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.utils.tensor_fragment import get_hp_fragment_mapping

STATES = ("exp_avg", "exp_avg_sq")


class OptimizerOfARankWithPadding(ZeROOptimizer):
    """Of the first group it owns a parameter, of the second one nothing: other ranks own all of that."""

    def __init__(self):
        self.mpu = None
        owned, elsewhere = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        self.lp_groups = [[owned], [elsewhere]]
        self.param_names = {owned: "owned", elsewhere: "elsewhere"}
        self.partitions = [torch.nn.Parameter(torch.zeros(2)) for _ in self.lp_groups]
        self.optimizer = torch.optim.Adam([{"params": [partition]} for partition in self.partitions])
        owned._hp_mapping = get_hp_fragment_mapping(owned, 0, self.partitions[0], {}, {}, False, 0, 0, 2)
        elsewhere._hp_mapping = None
        enable_universal_checkpoint([owned])

    def _load_global_state(self, sd):
        pass


@pytest.fixture
def optimizer():
    return OptimizerOfARankWithPadding()


def _write_checkpoint(folder, step):
    """The part of what ds_to_universal writes that is loaded here."""
    for name in ("owned", "elsewhere"):
        os.makedirs(folder / "zero" / name)
        for state in ("fp32", *STATES):
            torch.save({"param": torch.ones(1)}, folder / "zero" / name / f"{state}.pt")
        if step is not None:
            torch.save(step, folder / "zero" / name / "step.pt")
    groups = [{"lr": 0.5, "params": [0]}, {"lr": 0.25, "params": [1]}]
    torch.save({"param_groups": groups}, folder / "zero" / "optimizer_state.pt")


@pytest.mark.parametrize("step", [torch.tensor(3.0), 3])
def test_padding_is_at_the_step_of_its_group(optimizer, step, tmp_path):
    _write_checkpoint(tmp_path, step)
    optimizer.load_hp_checkpoint_state_from_checkpoint_dir("lp_groups", str(tmp_path))
    owned, state = (optimizer.optimizer.state[partition] for partition in optimizer.partitions)
    assert owned["step"] == step
    assert all(torch.equal(owned[key], torch.tensor([1.0, 0.0])) for key in STATES)
    assert type(state["step"]) is type(step)
    assert state["step"] == step
    assert all(torch.equal(state[key], torch.zeros(2)) for key in STATES)
    assert set(state) == {"step", *STATES}
    assert [group["lr"] for group in optimizer.optimizer.param_groups] == [0.5, 0.25]


def test_a_checkpoint_without_steps(optimizer, tmp_path):
    _write_checkpoint(tmp_path, None)
    optimizer.load_hp_checkpoint_state_from_checkpoint_dir("lp_groups", str(tmp_path))
    assert set(optimizer.optimizer.state[optimizer.partitions[1]]) == set(STATES)


def test_experts_that_other_ranks_own(optimizer, tmp_path):
    """They are there by their numbers among all ranks, where the rank counts its own."""
    experts = "layer.deepspeed_moe.experts.deepspeed_experts."
    _, (elsewhere, ) = optimizer.lp_groups
    optimizer.param_names[elsewhere] = f"{experts}1.weight"
    _write_checkpoint(tmp_path, 3)
    os.rename(tmp_path / "zero" / "elsewhere", tmp_path / "zero" / f"{experts}global_1.weight")
    optimizer.load_hp_checkpoint_state_from_checkpoint_dir("lp_groups", str(tmp_path))
    assert optimizer.optimizer.state[optimizer.partitions[1]]["step"] == 3
