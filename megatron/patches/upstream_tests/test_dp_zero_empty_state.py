# Copyright (c) 2025, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest
import torch

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range

SIZES = {"a": 6, "b": 4}
NUMEL = 10
PADDED_NUMEL = 12


@pytest.fixture
def group(tmp_path):
    """A Gloo group of this process alone."""
    if torch.distributed.is_initialized():
        ranks = [[rank] for rank in range(torch.distributed.get_world_size())]
        yield torch.distributed.new_subgroups_by_enumeration(ranks, backend="gloo")[0]
        return
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.fixture
def optimizer(group):
    """What a save reads of a distributed optimizer: two parameters in one bucket, no step taken."""
    params = {name: torch.nn.Parameter(torch.rand(size)) for name, size in SIZES.items()}
    main_params = [torch.nn.Parameter(param.detach().clone()) for param in params.values()]
    param_map, start = {}, 0
    for param in params.values():
        whole = Range(start, start + param.numel())
        ranges = dict.fromkeys(("gbuf_world", "gbuf_world_in_bucket", "gbuf_local"), whole)
        param_map[param] = {**ranges, "param": Range(0, param.numel())}
        start += param.numel()

    optimizer = DistributedOptimizer.__new__(DistributedOptimizer)
    optimizer.optimizer = torch.optim.AdamW(main_params, lr=0.1)
    optimizer.step_count = 0
    optimizer.model_chunks = [torch.nn.ParameterDict(params)]
    group_indices = {param: (0, order) for order, param in enumerate(params.values())}
    optimizer.model_param_group_index_map = group_indices
    optimizer.gbuf_ranges = [{(torch.float32, torch.float32): [{"param_map": param_map}]}]
    bucket = SimpleNamespace(grad_data=torch.zeros(PADDED_NUMEL), numel_unpadded=NUMEL)
    optimizer.buffers = [SimpleNamespace(buckets=[bucket], numel_unpadded=NUMEL)]
    optimizer.data_parallel_group = optimizer.data_parallel_group_gloo = group
    optimizer.ddp_config = SimpleNamespace(use_custom_fsdp=False, use_megatron_fsdp=False)
    optimizer.config = SimpleNamespace(
        optimizer="adam",
        use_precision_aware_optimizer=False,
        use_precision_aware_optimizer_no_fp8_or_ds_fp8=False,
    )
    optimizer.grad_scaler = None
    return optimizer


def _step(optimizer, indices):
    params = optimizer.optimizer.param_groups[0]["params"]
    for index in indices:
        params[index].grad = torch.ones_like(params[index])
    optimizer.optimizer.step()


def _gathered(optimizer):
    (tensors,) = optimizer.get_parameter_state_dp_zero()[0].values()
    return tensors


def test_state_before_first_step_is_saved_as_zeros(optimizer):
    tensors = _gathered(optimizer)

    main_params = optimizer.optimizer.param_groups[0]["params"]
    assert torch.equal(tensors["param"], torch.cat([param.detach() for param in main_params]))
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(tensors[key], torch.zeros(NUMEL))
    assert len(optimizer.optimizer.state) == 0


def test_frozen_param_is_saved_as_zeros(optimizer):
    optimizer.model_chunks[0]["b"].requires_grad = False
    _step(optimizer, [0])
    tensors = _gathered(optimizer)

    stepped = optimizer.optimizer.param_groups[0]["params"][0]
    for key in ("exp_avg", "exp_avg_sq"):
        moment = optimizer.optimizer.state[stepped][key]
        assert torch.equal(tensors[key], torch.cat([moment, torch.zeros(SIZES["b"])]))


@pytest.mark.parametrize("lost", [("exp_avg_sq",), ("exp_avg", "exp_avg_sq")])
def test_lost_moment_is_an_error(optimizer, lost):
    _step(optimizer, [0, 1])
    state = optimizer.optimizer.state[optimizer.optimizer.param_groups[0]["params"][1]]
    for key in lost:
        del state[key]
    with pytest.raises(KeyError, match=", ".join(lost)):
        _gathered(optimizer)


def test_state_that_is_lost_as_a_whole_is_an_error(optimizer):
    """The step of FusedAdam is in the param groups."""
    _step(optimizer, [0, 1])
    optimizer.optimizer.param_groups[0]["step"] = 1
    optimizer.optimizer.state.clear()
    with pytest.raises(KeyError, match="lost"):
        _gathered(optimizer)
