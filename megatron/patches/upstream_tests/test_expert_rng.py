# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest
import torch

from megatron.training import checkpointing


def layout(ep, random_init=False):
    sizes = {"expert_model": ep, "expert_tensor": 1, "tensor_model": 1, "pipeline_model": 1}
    sizes = {f"{kind}_parallel_size": size for kind, size in sizes.items()}
    return SimpleNamespace(data_parallel_random_init=random_init, context_parallel_size=1, **sizes)


def run_of(monkeypatch, dp_rank, dp_size, ep, random_init=False, ckpt_format="torch_dist"):
    """A rank of a run without tensor parallelism, and the RNG state that it saves."""
    group = SimpleNamespace(rank=lambda: dp_rank, size=lambda: dp_size)
    mpu = SimpleNamespace(
        get_data_parallel_group=lambda with_context_parallel=False: group,
        get_data_parallel_rank=lambda with_context_parallel=False: dp_rank,
        get_data_parallel_world_size=lambda with_context_parallel=False: dp_size,
        get_expert_model_parallel_world_size=lambda: ep,
        get_expert_tensor_parallel_world_size=lambda: 1,
        get_pipeline_model_parallel_rank=lambda: 0,
        get_tensor_model_parallel_rank=lambda: 0,
        get_tensor_model_parallel_world_size=lambda: 1,
        model_parallel_is_initialized=lambda: True,
    )
    tracker = SimpleNamespace(get_states=dict)
    monkeypatch.setattr(checkpointing, "get_args", lambda: layout(ep, random_init))
    monkeypatch.setattr(checkpointing, "mpu", mpu)
    monkeypatch.setattr(checkpointing, "get_pg_rank", lambda group: 0)
    monkeypatch.setattr(checkpointing, "get_pg_size", lambda group: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(checkpointing.tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    return checkpointing.get_rng_state(ckpt_format, None, None)


def to_load(rng_state, saved_ep, *saved):
    """The RNG state to load from a checkpoint with these."""
    if isinstance(rng_state, dict):
        index = [f"rng_state.{key}.0.torch_rng_state" for one in saved for key in one]
    else:
        index = [one.unique_key for one in saved]
    return checkpointing.rng_state_to_load(rng_state, layout(saved_ep), "folder", index)


FORMATS = pytest.mark.parametrize("ckpt_format", ["torch_dist", "fsdp_dtensor"])


def test_each_rank_saves_its_own_shard(monkeypatch):
    saved = [run_of(monkeypatch, rank, 4, ep=2) for rank in range(4)]
    assert [one.global_offset for one in saved] == [(0, 0, rank) for rank in range(4)]
    assert {(one.global_shape, one.replica_id) for one in saved} == {((1, 1, 4), 0)}


def test_each_rank_saves_its_own_key(monkeypatch):
    own = run_of(monkeypatch, 3, 4, ep=2, ckpt_format="fsdp_dtensor")
    assert list(own) == ["(0, 0), DP rank 3 of 4"]
    assert checkpointing.rng_state_by_shared_key(own) == {"(0, 0)": next(iter(own.values())) * 4}


@FORMATS
def test_each_rank_loads_its_own(monkeypatch, ckpt_format):
    saved = [run_of(monkeypatch, rank, 4, ep=2, ckpt_format=ckpt_format) for rank in range(4)]
    assert to_load(saved[3], 2, *saved) is saved[3]


@FORMATS
def test_ranks_with_the_same_experts_share_a_state(monkeypatch, ckpt_format):
    shared = run_of(monkeypatch, 1, 2, ep=1, ckpt_format=ckpt_format)
    assert to_load(shared, 1, shared) is shared
    if ckpt_format == "torch_dist":
        assert (shared.global_shape, shared.replica_id) == ((1, 1), 1)


@FORMATS
def test_the_state_of_one_rank_is_ignored(monkeypatch, capsys, ckpt_format):
    shared = run_of(monkeypatch, 0, 4, ep=1, ckpt_format=ckpt_format)
    own = run_of(monkeypatch, 1, 4, ep=2, ckpt_format=ckpt_format)
    assert to_load(own, 2, shared) is None
    assert "RNG state will be ignored" in capsys.readouterr().out


@FORMATS
def test_a_state_with_those_of_all_ranks_is_loaded(monkeypatch, ckpt_format):
    shared = run_of(monkeypatch, 1, 4, ep=1, ckpt_format=ckpt_format)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    own = run_of(monkeypatch, 1, 4, ep=2, random_init=True, ckpt_format=ckpt_format)
    loaded = to_load(own, 2, shared)
    if ckpt_format == "torch_dist":
        assert loaded.unique_key == shared.unique_key
    else:
        assert loaded.keys() == shared.keys()


@FORMATS
@pytest.mark.parametrize(("dp_size", "ep"), [(4, 4), (2, 2), (4, 1)])
def test_states_of_another_layout_are_ignored(monkeypatch, capsys, dp_size, ep, ckpt_format):
    saved = [run_of(monkeypatch, rank, 4, ep=2, ckpt_format=ckpt_format) for rank in range(4)]
    own = run_of(monkeypatch, 0, dp_size, ep=ep, ckpt_format=ckpt_format)
    assert to_load(own, 2, *saved) is None
    assert "RNG state will be ignored" in capsys.readouterr().out
