# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

import pytest
import torch

from megatron.core.rerun_state_machine import RerunMode, RerunState, RerunStateMachine


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *args: 1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *args: 0)


def saved(mode, state, data_iterator=None):
    machine = RerunStateMachine(mode=mode)
    machine.state = state
    return machine.state_dict(data_iterator, "torch_dist")


def test_ordinary_checkpoint_has_the_object_of_a_suspicious_one():
    ordinary = saved(RerunMode.VALIDATE_RESULTS, RerunState.NOT_RUNNING_YET)
    suspicious = saved(RerunMode.VALIDATE_RESULTS, RerunState.WILL_RERUN_FROM_CHECKPOINT)
    assert ordinary["sharded"].unique_key == suspicious["sharded"].unique_key
    assert ordinary["sharded"].replica_id == suspicious["sharded"].replica_id


def test_load_ignores_the_state_of_an_ordinary_checkpoint():
    ordinary = saved(RerunMode.VALIDATE_RESULTS, RerunState.NOT_RUNNING_YET)
    assert not RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS).validate_state_dict(ordinary)


def test_ordinary_checkpoint_needs_no_wrapped_data_iterator():
    ordinary = saved(RerunMode.VALIDATE_RESULTS, RerunState.NOT_RUNNING_YET, iter([1, 2]))
    assert ordinary["sharded"].data["data_iterator_checkpoints"] is None


def test_disabled_machine_saves_nothing():
    assert saved(RerunMode.DISABLED, RerunState.NOT_RUNNING_YET) is None
