# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

SAVED_STEPS, SKIPPED_STEPS = 9, 2
STEP_AT_SET_UP = 1


def _engine(step):
    """What a load needs of an engine, and of an optimizer that has taken the step of its set-up."""
    engine = DeepSpeedEngine.__new__(DeepSpeedEngine)
    torch.nn.Module.__init__(engine)
    param = torch.nn.Parameter(torch.zeros(2))
    inner = torch.optim.AdamW([param], lr=1.0)
    inner.state[param] = {"step": step, "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    inner.param_groups[0]["step"] = STEP_AT_SET_UP  # as fused optimizers have it
    engine.optimizer = SimpleNamespace(optimizer=inner, param_groups=inner.param_groups, update_lp_params=lambda: None)
    engine._optimizer_has_ckpt_event_prologue = lambda: False
    engine._optimizer_has_ckpt_event_epilogue = lambda: False
    engine.load_universal_checkpoint = lambda: True
    engine.zero_optimization = lambda: True
    engine._load_zero_checkpoint = lambda *args, **kwargs: True

    def load_model_states(*args, **kwargs):
        engine.global_steps, engine.skipped_steps = SAVED_STEPS, SKIPPED_STEPS
        return "model_states.pt", {}

    engine._load_checkpoint = load_model_states
    return engine


def _steps(engine):
    inner = engine.optimizer.optimizer
    return [inner.param_groups[0]["step"], *(state["step"] for state in inner.state.values())]


@pytest.mark.parametrize("step", [STEP_AT_SET_UP, torch.tensor(float(STEP_AT_SET_UP))], ids=["number", "tensor"])
def test_a_universal_load_sets_the_step(step):
    engine = _engine(step)
    engine.load_checkpoint("folder", tag="tag")
    assert _steps(engine) == [SAVED_STEPS - SKIPPED_STEPS + STEP_AT_SET_UP] * 2


def test_a_second_load_sets_it_again():
    engine = _engine(torch.tensor(float(STEP_AT_SET_UP)))
    for _ in range(2):
        engine.load_checkpoint("folder", tag="tag")
        assert _steps(engine) == [SAVED_STEPS - SKIPPED_STEPS + STEP_AT_SET_UP] * 2
        for state in engine.optimizer.optimizer.state.values():
            state["step"] += 1


def test_a_load_of_the_weights_alone_sets_none():
    engine = _engine(STEP_AT_SET_UP)
    engine.load_checkpoint("folder", tag="tag", load_optimizer_states=False)
    assert _steps(engine) == [STEP_AT_SET_UP] * 2
