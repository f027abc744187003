# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest
import torch

from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

NUMEL = 6
TYPES = {torch.bfloat16: "torch.cuda.BFloat16Tensor", torch.float32: "torch.cuda.FloatTensor"}
CONFIG = SimpleNamespace(
    config_logger_dir="",
    fp8_recipe=None,
    optimizer="adam",
    use_precision_aware_optimizer=False,
    use_precision_aware_optimizer_no_fp8_or_ds_fp8=False,
)


def parameter(dtype):
    param = torch.nn.Parameter(torch.rand(NUMEL).to(dtype))
    param.type = lambda: TYPES[dtype]  # also on a machine without a GPU
    return param


def buffer_of(param):
    """A grad buffer of one parameter, all of it on this rank."""
    everything = distrib_optimizer.Range(0, NUMEL)
    param_map = {param: {"param": everything, "gbuf_world": everything, "gbuf_local": everything}}
    dtypes = (param.dtype, torch.float32)
    ranges = {dtypes: [{"param_map": param_map}]}
    return SimpleNamespace(
        param_dtype=param.dtype, grad_dtype=torch.float32, buckets=[], ranges=ranges
    )


@pytest.fixture
def params():
    return [parameter(torch.bfloat16), parameter(torch.float32)]


@pytest.fixture
def optimizer(params, monkeypatch):
    """Of one param group; the buffer of the bf16 parameter comes first, as in most models."""
    monkeypatch.setattr(
        distrib_optimizer.MixedPrecisionOptimizer,
        "__init__",
        lambda self, optimizer, config, *_: vars(self).update(optimizer=optimizer, config=config),
    )
    monkeypatch.setattr(distrib_optimizer, "partition_buckets", lambda buffers: [])
    ranges_of = staticmethod(lambda buffer: buffer.ranges)
    monkeypatch.setattr(DistributedOptimizer, "_build_gbuf_range_map", ranges_of)
    inner = distrib_optimizer.Adam([{"params": list(params)}])
    ddp_config = SimpleNamespace(use_custom_fsdp=False, use_megatron_fsdp=False)
    chunk = SimpleNamespace(ddp_config=ddp_config)
    buffers = {0: [buffer_of(param) for param in params]}
    return DistributedOptimizer(inner, CONFIG, None, None, [chunk], buffers, None, None, 0, 0)


@pytest.fixture
def one_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: None)


def states_of(optimizer, params):
    return [optimizer._get_main_param_and_optimizer_states(param) for param in params]


def load(optimizer, params, states):
    optimizer.weights_of_checkpoint = optimizer._weights_of_mixed_dtype_groups()
    for param, tensors in zip(params, states, strict=True):
        optimizer._set_main_param_and_optimizer_states(param, tensors)
    optimizer._check_states_of_mixed_dtype_groups()


def test_main_params_are_those_of_their_parameters(optimizer, params):
    for param, states in zip(params, states_of(optimizer, params), strict=True):
        assert torch.equal(states["param"], param.float())


@pytest.mark.parametrize("saved_in", ["order of groups", "order of buffers"])
def test_states_are_loaded_into_their_parameters(optimizer, params, one_rank, saved_in):
    saved = [{"param": param.detach().float().clone()} for param in params]

    load(optimizer, params, saved if saved_in == "order of groups" else saved[::-1])

    for states, expected in zip(states_of(optimizer, params), saved, strict=True):
        assert torch.equal(states["param"], expected["param"])


def test_states_of_other_weights_are_refused(optimizer, params, one_rank):
    foreign = [{"param": torch.rand(NUMEL)} for _ in params]

    with pytest.raises(ValueError, match="Cannot tell whose states"):
        load(optimizer, params, foreign)
