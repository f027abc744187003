# Copyright (c) 2025, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import torch

from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range

NUMEL = 10
SHARD = slice(3, 8)  # of the parameter, on this rank
DTYPE = (torch.bfloat16, torch.float32)


def _optimizer(model_param, param, *, clone=None, working_copy=None):
    """A distributed optimizer around a hybrid one; `param` is this rank's part of `model_param`."""
    hybrid = HybridDeviceOptimizer.__new__(HybridDeviceOptimizer)
    torch.optim.Optimizer.__init__(hybrid, [param], {})
    hybrid.gpu_params_map_cpu_copy = {} if clone is None else {param: clone}
    hybrid.param_to_fp32_param = {} if working_copy is None else {param: working_copy}

    optimizer = DistributedOptimizer.__new__(DistributedOptimizer)
    optimizer.optimizer = hybrid
    optimizer.model_chunks = [torch.nn.ParameterDict({"weight": model_param})]
    optimizer.model_param_group_index_map = {model_param: (0, 0)}
    optimizer.model_param_gbuf_map = {model_param: (0, DTYPE, 0)}
    ranges = {"param": Range(SHARD.start, SHARD.stop)}
    optimizer.gbuf_ranges = [{DTYPE: [{"param_map": {model_param: ranges}}]}]
    optimizer.ddp_config = SimpleNamespace(use_custom_fsdp=False, use_megatron_fsdp=False)
    optimizer.is_stub_optimizer = False
    return optimizer


def _initial():
    return torch.zeros(SHARD.stop - SHARD.start)


def test_main_params_and_cpu_clones_follow_model_params():
    model_param = torch.nn.Parameter(torch.rand(2, NUMEL // 2).bfloat16())
    shard, clone = _initial(), _initial()
    _optimizer(model_param, shard, clone=clone).reload_model_params()

    loaded = model_param.detach().float().flatten()[SHARD]
    assert torch.equal(shard, loaded)
    assert torch.equal(clone, loaded)


def test_cpu_clones_of_native_fp32_params_follow():
    """With the precision-aware optimizer the shard is a view of the model param itself."""
    model_param = torch.nn.Parameter(torch.rand(NUMEL))
    clone = _initial()
    _optimizer(model_param, model_param.detach()[SHARD], clone=clone).reload_model_params()
    assert torch.equal(clone, model_param.detach()[SHARD])


def test_every_copy_of_precision_aware_optimizer_follows():
    model_param = torch.nn.Parameter(torch.rand(NUMEL).bfloat16())
    shard = model_param.detach()[SHARD]
    working_copy, master_param = _initial(), _initial()
    optimizer = _optimizer(model_param, shard, working_copy=working_copy)
    optimizer.optimizer.state[shard]["master_param"] = master_param
    optimizer.reload_model_params()

    loaded = model_param.detach().float()[SHARD]
    assert torch.equal(working_copy, loaded)
    assert torch.equal(master_param, loaded)


def test_copies_follow_the_params_of_megatron_fsdp():
    """There is no map of shards: the params of the optimizer are those that were loaded."""
    param, clone = torch.nn.Parameter(torch.rand(NUMEL)), torch.zeros(NUMEL)
    optimizer = _optimizer(param, param, clone=clone)
    del optimizer.model_param_group_index_map
    optimizer.reload_model_params()
    assert torch.equal(clone, param.detach())


def test_state_dict_keeps_its_precision():
    exact = torch.rand(NUMEL)
    model_param = torch.nn.Parameter(exact.bfloat16())
    shard, clone = _initial(), _initial()
    optimizer = _optimizer(model_param, shard, clone=clone)
    optimizer.reload_model_params(state_dict={"model": {"weight": exact}})
    assert torch.equal(shard, exact[SHARD])
    assert torch.equal(clone, exact[SHARD])
