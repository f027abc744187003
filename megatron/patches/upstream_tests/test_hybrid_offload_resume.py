# Copyright (c) 2025, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest
import torch

from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

NUMEL = 6


@pytest.fixture
def hybrid(monkeypatch):
    """A hybrid optimizer of one CPU parameter, also on a machine without a GPU."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    return HybridDeviceOptimizer(
        [torch.zeros(NUMEL, requires_grad=True)],
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=False,
    )


def _distributed(hybrid, precision_aware=False):
    """A distributed optimizer around it, and the model parameter of its one parameter."""
    model_param = torch.nn.Parameter(torch.zeros(NUMEL))
    optimizer = DistributedOptimizer.__new__(DistributedOptimizer)
    optimizer.optimizer = hybrid
    optimizer.config = SimpleNamespace(
        use_precision_aware_optimizer=precision_aware,
        use_precision_aware_optimizer_no_fp8_or_ds_fp8=precision_aware,
    )
    optimizer.ddp_config = SimpleNamespace(use_custom_fsdp=False, use_megatron_fsdp=False)
    optimizer.model_param_group_index_map = {model_param: (0, 0)}
    optimizer.is_stub_optimizer = False
    return optimizer, model_param


def _set(optimizer, model_param, tensors):
    with torch.no_grad():
        optimizer._set_main_param_and_optimizer_states(model_param, tensors)


@pytest.mark.parametrize("groups", [[{}], [{"step": 5}]])
def test_moments_without_a_step_are_refused(hybrid, groups):
    optimizer, model_param = _distributed(hybrid)
    moments = {"param": torch.ones(NUMEL), "exp_avg": torch.ones(NUMEL)}
    optimizer._has_no_step = "step" not in groups[0]
    if "step" in groups[0]:
        assert "exp_avg" in optimizer._state_of_hybrid_optimizer(moments)
        return
    with pytest.raises(RuntimeError, match="no step"):
        _set(optimizer, model_param, moments)


def test_cpu_clones_get_loaded_main_params(hybrid):
    """A clone of an fp32 shard is no fp32 copy of a 16-bit one, and is stepped all the same."""
    (param,) = hybrid.param_groups[0]["params"]
    clone, loaded = torch.zeros(NUMEL), torch.rand(NUMEL)
    hybrid.param_to_inner_param = {param: clone}
    hybrid.state[param] = {"master_param": loaded}
    hybrid._update_fp32_params_by_new_state()
    assert torch.equal(clone, loaded)
    assert torch.equal(param, loaded)


def test_params_follow_loaded_main_params(hybrid):
    """Initialising the state took a step, which moved them."""
    moved, copy, loaded = torch.ones(NUMEL).bfloat16(), torch.ones(NUMEL), torch.rand(NUMEL)
    hybrid.param_groups[0]["params"] = [moved]
    hybrid.param_to_fp32_param = hybrid.param_to_inner_param = {moved: copy}
    hybrid.state = {moved: {"master_param": loaded}}
    hybrid._update_fp32_params_by_new_state()
    assert torch.equal(copy, loaded)
    assert torch.equal(moved, loaded.bfloat16())


def test_sub_optimizers_count_on_from_loaded_step(hybrid):
    """FusedAdam keeps the step in its param groups."""
    hybrid.param_groups[0]["step"] = 3
    (sub_optimizer,) = hybrid.sub_optimizers
    sub_optimizer.param_groups[0]["step"] = 4
    hybrid._sync_hdo_param_groups_to_sub_optimizers()
    assert sub_optimizer.param_groups[0]["step"] == 4


@pytest.mark.parametrize("precision_aware", [False, True])
def test_state_gets_loaded_main_param_and_keeps_its_step(hybrid, precision_aware):
    (param,) = hybrid.param_groups[0]["params"]
    optimizer, model_param = _distributed(hybrid, precision_aware)
    step = torch.tensor(3.0)
    hybrid.state[param] = {
        key: torch.zeros(NUMEL) for key in ("exp_avg", "exp_avg_sq", "master_param")
    }
    hybrid.state[param]["step"] = step
    bucket = torch.rand(3, 2 * NUMEL)
    tensors = {key: bucket[i, :NUMEL] for i, key in enumerate(("param", "exp_avg", "exp_avg_sq"))}
    _set(optimizer, model_param, {**tensors, "step": torch.tensor(0.0)})

    state = hybrid.state[param]
    assert torch.equal(state["master_param"], tensors["param"])
    assert torch.equal(state["exp_avg"], tensors["exp_avg"])
    assert state["step"] == 3
    assert state["exp_avg"].untyped_storage().nbytes() == 4 * NUMEL, "keeps the whole bucket alive"
