# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.training import checkpointing
from megatron.training.checkpointing import CheckpointType

STATES = {"expert-parallel-rng": "own", "model-parallel-rng": "shared"}
ARGS = {"tensor_model_parallel_size": 1, "expert_tensor_parallel_size": 1}


def run_of(monkeypatch, dp_rank, dp_size, ep, random_init=False, ckpt_format="torch_dist"):
    """A rank of a run without tensor parallelism; its groups are lists of ranks."""
    args = SimpleNamespace(
        expert_model_parallel_size=ep, data_parallel_random_init=random_init, **ARGS
    )
    same_experts = [rank for rank in range(dp_size) if rank % ep == dp_rank % ep]
    mpu = SimpleNamespace(
        get_context_parallel_group=lambda: [dp_rank],
        get_data_parallel_group=lambda with_context_parallel=False: list(range(dp_size)),
        get_data_parallel_rank=lambda with_context_parallel=False: dp_rank,
        get_data_parallel_world_size=lambda with_context_parallel=False: dp_size,
        get_expert_data_parallel_group=lambda: same_experts,
        get_expert_model_parallel_world_size=lambda: ep,
        get_expert_tensor_parallel_world_size=lambda: 1,
        get_pipeline_model_parallel_rank=lambda: 0,
        get_tensor_model_parallel_rank=lambda: 0,
        get_tensor_model_parallel_world_size=lambda: 1,
        model_parallel_is_initialized=lambda: True,
    )
    tracker = SimpleNamespace(get_states=lambda: dict(STATES))
    monkeypatch.setattr(checkpointing, "get_args", lambda: args)
    monkeypatch.setattr(checkpointing, "mpu", mpu)
    monkeypatch.setattr(checkpointing, "get_pg_rank", lambda group: 0)
    monkeypatch.setattr(checkpointing, "get_pg_size", lambda group: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: group)
    monkeypatch.setattr(checkpointing.tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    return checkpointing.get_rng_state(ckpt_format, None, None)


def checkpoint_with(monkeypatch, objects):
    metadata = SimpleNamespace(state_dict_metadata=[one.unique_key for one in objects])
    monkeypatch.setattr(
        checkpointing.dist_checkpointing.strategies.torch,
        "_get_filesystem_reader",
        lambda folder: SimpleNamespace(read_metadata=lambda: metadata),
    )


def saved_with(ep):
    return {"args": SimpleNamespace(expert_model_parallel_size=ep, **ARGS)}


def to_load(rng_state, ep, ckpt_type=CheckpointType.GLOBAL):
    return checkpointing.rng_state_to_load(rng_state, saved_with(ep), "folder", ckpt_type)


def test_each_rank_saves_and_loads_its_own_state(monkeypatch):
    saved = [run_of(monkeypatch, rank, 4, ep=2) for rank in range(4)]
    assert [one.global_offset for one in saved] == [(0, 0, rank) for rank in range(4)]
    assert {(one.global_shape, one.replica_id) for one in saved} == {((1, 1, 4), 0)}
    checkpoint_with(monkeypatch, saved)
    assert to_load(saved[3], ep=2) == (saved[3], False)


def test_ranks_without_experts_of_their_own_share_a_state(monkeypatch):
    shared = run_of(monkeypatch, 1, 2, ep=1)
    assert (shared.global_shape, shared.replica_id) == ((1, 1), 1)
    assert to_load(shared, ep=1) == (shared, False)


@pytest.mark.parametrize("random_init", [False, True])
def test_of_a_shared_state_the_experts_is_not_that_of_others(monkeypatch, capsys, random_init):
    checkpoint_with(monkeypatch, [ShardedObject("rng_state", None, (1, 1), (0, 0))])
    for rank in range(4):
        own = run_of(monkeypatch, rank, 4, ep=2, random_init=random_init)
        shared, keep_own = to_load(own, ep=2)
        assert (shared.global_shape, shared.replica_id) == ((1, 1), rank)
        assert keep_own == (rank % 2 == 1 and not random_init)
    assert ("expert-parallel rank 1 are not in it" in capsys.readouterr().out) != random_init
    loaded = {"rng_tracker_states": {"expert-parallel-rng": 0, "model-parallel-rng": 0}}
    kept = checkpointing.with_expert_rng_of_this_run(loaded)["rng_tracker_states"]
    assert kept == {"expert-parallel-rng": "own", "model-parallel-rng": 0}


@pytest.mark.parametrize(("saved_ep", "dp_size", "ep"), [(2, 4, 2), (4, 2, 2), (2, 2, 1)])
def test_states_of_ranks_with_other_experts_are_ignored(monkeypatch, capsys, saved_ep, dp_size, ep):
    checkpoint_with(
        monkeypatch, [ShardedObject("rng_state", None, (1, 1, 2), (0, 0, 0), replica_id=0)]
    )
    own = run_of(monkeypatch, 0, dp_size, ep=ep)
    assert to_load(own, ep=saved_ep) == (None, False)
    assert "RNG state will be ignored" in capsys.readouterr().out


def test_a_local_checkpoint_keeps_one_state_a_rank(monkeypatch):
    own = run_of(monkeypatch, 1, 2, ep=2)
    local, keep_own = to_load(own, ep=2, ckpt_type=CheckpointType.LOCAL)
    assert (local.global_shape, local.replica_id, keep_own) == ((1, 1), 1, False)


def keyed_to_load(folder, rng_state):
    reader = FileSystemReader(folder)
    return checkpointing.keyed_rng_state_to_load(
        rng_state, reader, reader.read_metadata().state_dict_metadata
    )


def save_keyed(folder, ep, rng_state):
    torch.distributed.checkpoint.save_state_dict(
        {**saved_with(ep), "rng_state": rng_state}, FileSystemWriter(folder), no_dist=True
    )


def test_each_rank_has_a_key_in_fsdp_dtensor(monkeypatch, capsys, tmp_path):
    saved = [run_of(monkeypatch, rank, 4, ep=2, ckpt_format="fsdp_dtensor") for rank in range(4)]
    save_keyed(tmp_path, 2, {key: states for one in saved for key, states in one.items()})
    asked, keep_own = keyed_to_load(tmp_path, saved[3])
    assert (list(asked), keep_own) == (["(0, 0), DP rank 3 of 4"], False)
    assert list(checkpointing.rng_state_by_shared_key(asked).items()) == [
        ("(0, 0)", asked["(0, 0), DP rank 3 of 4"] * 4)
    ]
    for dp_size, ep in ((2, 2), (4, 4), (4, 1)):
        own = run_of(monkeypatch, 0, dp_size, ep=ep, ckpt_format="fsdp_dtensor")
        assert keyed_to_load(tmp_path, own) == (None, False)
        assert "RNG state will be ignored" in capsys.readouterr().out


def test_a_shared_key_of_fsdp_dtensor_has_the_experts_state_of_an_unknown_rank(
    monkeypatch, capsys, tmp_path
):
    save_keyed(tmp_path, 2, run_of(monkeypatch, 0, 2, ep=1, ckpt_format="fsdp_dtensor"))
    for rank in range(4):
        own = run_of(monkeypatch, rank, 4, ep=2, ckpt_format="fsdp_dtensor")
        asked, keep_own = keyed_to_load(tmp_path, own)
        assert (list(asked), keep_own) == (["(0, 0)"], True)
    assert "all data-parallel ranks but one" in capsys.readouterr().out
    own = run_of(monkeypatch, 1, 2, ep=1, ckpt_format="fsdp_dtensor")
    assert keyed_to_load(tmp_path, own) == (own, False)
