# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest
import torch

from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def param_state(monkeypatch, instance, rank, is_loading):
    """What a rank of an optimizer instance saves or loads."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group.rank())
    optimizer = SimpleNamespace(
        data_parallel_group=SimpleNamespace(rank=lambda: rank),
        data_parallel_group_idx=0,
        distributed_optimizer_instance_id=instance,
        get_parameter_state_dp_zero=lambda **kwargs: {"gathered on": rank},
    )
    return DistributedOptimizer.sharded_param_state_dp_zero(optimizer, {}, is_loading)


@pytest.mark.parametrize("instance", [0, 1, 2])
def test_first_rank_of_each_instance_loads(monkeypatch, instance):
    state = param_state(monkeypatch, instance, rank=0, is_loading=True)
    assert isinstance(state, ShardedObject)
    # One rank alone is the main replica of an object.
    assert is_main_replica(state.replica_id) == (instance == 0)


@pytest.mark.parametrize("instance", [0, 1])
def test_other_ranks_get_their_state_from_the_first(monkeypatch, instance):
    state = param_state(monkeypatch, instance, rank=1, is_loading=True)
    assert not isinstance(state, ShardedObject)


@pytest.mark.parametrize("instance", [0, 1])
def test_first_instance_saves(monkeypatch, instance):
    state = param_state(monkeypatch, instance, rank=0, is_loading=False)
    assert isinstance(state, ShardedObject) == (instance == 0)
