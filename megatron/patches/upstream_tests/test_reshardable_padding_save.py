# Copyright (c) 2025, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest
import torch

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

DTYPE = (torch.bfloat16, torch.float32)
STATES = ("param", "exp_avg", "exp_avg_sq")
NUMEL, UNPADDED, RANKS = 8, 3, 2  # of one bucket: all of it is on rank 0


class Group:
    def __init__(self, rank):
        self._rank = rank

    def rank(self):
        return self._rank

    def size(self):
        return RANKS


def optimizer_of_rank(rank, monkeypatch, *, owns_another=True):
    optimizer = DistributedOptimizer.__new__(DistributedOptimizer)
    optimizer.data_parallel_group = Group(rank)
    optimizer.data_parallel_group_idx = optimizer.distributed_optimizer_instance_id = 0
    param = torch.nn.Parameter(torch.rand(UNPADDED))
    states = {key: torch.rand(UNPADDED) for key in STATES}
    optimizer.model_param_group_index_map = {param: (0, 0)} if rank == 0 or owns_another else {}
    bucket = SimpleNamespace(grad_data=torch.empty(NUMEL), numel_unpadded=UNPADDED, offset=0)
    owners = range(RANKS if owns_another else 1)
    index_map = {number: (number * 4, number * 4 + UNPADDED, 0) for number in owners}
    optimizer.buffers = [SimpleNamespace(buckets=[bucket], param_index_map=index_map)]
    optimizer.gbuf_ranges = [{DTYPE: [{"param_map": {}}]}]
    saved = [{**states, "gbuf_local_start": 0, "gbuf_local_end": UNPADDED}] if rank == 0 else []
    state = {"per_bucket_numel": None, "per_bucket_numel_unpadded": None, 0: {DTYPE: [saved]}}
    for name, value in (("get_rank", rank), ("get_world_size", RANKS)):
        monkeypatch.setattr(torch.distributed, name, lambda group=None, value=value: value)
    for name in ("fs_bucket_space", "dp_reshardable"):
        monkeypatch.setattr(optimizer, f"get_parameter_state_{name}", lambda: state, raising=False)
    monkeypatch.setattr(
        optimizer, "_get_main_param_and_optimizer_states", lambda _: states, raising=False
    )
    return optimizer, states


def shards(optimizer):
    save = getattr(optimizer, "sharded_param_state_dp_reshardable", None)
    if save is None:  # what the format was called before
        save = optimizer.sharded_param_state_fs_bucket_space
    buckets = save({})[0][DTYPE]
    assert all(buckets)  # a local checkpoint with an empty list does not load
    tensors = (t for bucket in buckets for entry in bucket for t in entry.values())
    return [t for t in tensors if isinstance(t, ShardedTensor)]


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_bucket_that_ends_before_a_shard_is_saved(rank, monkeypatch):
    optimizer, states = optimizer_of_rank(rank, monkeypatch)

    saved = shards(optimizer)

    assert all(t.global_offset[0] + t.local_shape[0] <= t.global_shape[0] for t in saved)
    own = {t.key.rpartition(".")[2]: t for t in saved if rank == 0 and t.data.numel() == UNPADDED}
    assert own.keys() == (set(STATES) if rank == 0 else set())
    assert all(torch.equal(t.data, states[key]) for key, t in own.items())


def test_a_rank_without_parameters_saves_padding_as_others_have_it(monkeypatch):
    optimizer, states = optimizer_of_rank(1, monkeypatch, owns_another=False)
    of_first = {key: (state.dtype, state.device.type) for key, state in states.items()}

    def all_gather_object(found, own, group=None):
        found[:] = [of_first, own]

    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)
    optimizer.buffers[0].buckets[0].numel_unpadded = NUMEL  # the gap in front of another parameter

    saved = shards(optimizer)

    assert {t.key.rpartition(".")[2]: t.dtype for t in saved} == {
        key: state.dtype for key, state in states.items()
    }
    assert [t.local_shape[0] for t in saved] == [NUMEL // RANKS] * len(STATES)
