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
STEPS = 1  # the third one of an engine has other gradients now and then, whatever was loaded
UNIVERSAL = "universal"


def _make_engine(groups=2, load_universal=False):
    """The weights are one group, and the biases without weight decay are another; each is cut in two."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    decayed, others = ([p for p in model.parameters() if (p.dim() > 1) == is_weight] for is_weight in (True, False))
    if groups == 1:
        param_groups = [{"params": decayed + others}]
    else:
        param_groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    config["zero_optimization"] = {"stage": 3, "sub_group_size": 4}
    config["checkpoint"] = {"load_universal": load_universal}
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(param_groups, lr=0.1), config=config)[0]


def _train(engine):
    for step in range(STEPS):
        samples = torch.full((1, 4), step + 1.0, dtype=torch.bfloat16, device=engine.device)
        engine.backward(engine(samples).float().pow(2).mean())
        engine.step()


def _save_universal(engine, folder):
    info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}, "iteration": STEPS}
    engine.save_checkpoint(folder, tag="saved", client_state=info)
    if dist.get_rank() == 0:
        folders = {"input_folder": os.path.join(folder, "saved"), "output_folder": os.path.join(folder, UNIVERSAL)}
        convert_to_universal(argparse.Namespace(**folders, inject_missing_state=False, **OPTIONS))
    dist.barrier()


def _settings(engine):
    groups = engine.optimizer.optimizer.param_groups
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def _states(engine):
    """Of each flat tensor, on this rank."""
    flat_tensors = engine.optimizer.fp32_partitioned_groups_flat
    return [(flat.detach(), engine.optimizer.optimizer.state[flat]) for flat in flat_tensors]


class TestZeRO3UniversalGroups(DistributedTest):
    world_size = 2

    def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(self, tmpdir):
        expected = _make_engine()
        _train(expected)
        _save_universal(expected, str(tmpdir))
        settings = _settings(expected)

        engine = _make_engine(load_universal=True)
        engine.load_checkpoint(str(tmpdir), tag=UNIVERSAL)
        assert [group["weight_decay"] for group in _settings(engine)] == [0.1, 0.0]
        assert _settings(engine) == settings

        _train(expected)
        _train(engine)
        for (found, state), (flat, expected_state) in zip(_states(engine), _states(expected)):
            assert state["step"] == 2 * STEPS
            assert torch.equal(found, flat)
            assert all(torch.equal(state[key], expected_state[key]) for key in ("exp_avg", "exp_avg_sq"))

    def test_one_group_that_is_cut_counts_its_steps_once(self, tmpdir):
        engine = _make_engine(groups=1)
        _train(engine)
        _save_universal(engine, str(tmpdir))

        engine = _make_engine(groups=1, load_universal=True)
        engine.load_checkpoint(str(tmpdir), tag=UNIVERSAL)
        _train(engine)

        assert [state["step"].item() for _, state in _states(engine)] == [2.0 * STEPS] * len(_states(engine))

    def test_groups_that_are_not_those_of_the_checkpoint_are_refused(self, tmpdir):
        engine = _make_engine(groups=1)
        _train(engine)
        _save_universal(engine, str(tmpdir))

        engine = _make_engine(groups=2, load_universal=True)
        with pytest.raises(ValueError, match="expected 1 param groups"):
            engine.load_checkpoint(str(tmpdir), tag=UNIVERSAL)
