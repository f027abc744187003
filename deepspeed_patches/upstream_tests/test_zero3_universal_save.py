# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import os
from types import MethodType, SimpleNamespace

import pytest
from deepspeed.runtime import engine
from deepspeed.runtime.engine import DeepSpeedEngine

RANK = 3


@pytest.fixture
def make_engine(monkeypatch):
    """A stage 3 engine of one rank of several, as far as the names of its files go."""
    monkeypatch.setattr(engine.dist, "get_rank", lambda group=None: RANK)

    def make(load_universal):
        made = SimpleNamespace(
            mpu=None,
            checkpoint_mp_rank=0,
            optimizer=SimpleNamespace(dp_process_group=None),
            zero_optimization_partition_weights=lambda: True,
            load_universal_checkpoint=lambda: load_universal,
        )
        for name in ("_get_ckpt_name", "_get_all_ckpt_names"):
            setattr(made, name, MethodType(getattr(DeepSpeedEngine, name), made))
        return made

    return make


def _name(rank):
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


@pytest.mark.parametrize("load_universal", [False, True])
def test_each_rank_saves_its_own_model_states(make_engine, load_universal):
    path = make_engine(load_universal)._get_ckpt_name("checkpoints", "step2")

    assert path == os.path.join("checkpoints", "step2", _name(RANK))


def test_all_ranks_load_the_first_model_states_of_a_universal_checkpoint(make_engine, tmp_path):
    (tmp_path / "step2").mkdir()
    for rank in (0, RANK):
        (tmp_path / "step2" / _name(rank)).touch()

    for load_universal, rank in ((True, 0), (False, RANK)):
        found = make_engine(load_universal)._get_all_ckpt_names(str(tmp_path), "step2")
        assert found == [str(tmp_path / "step2" / _name(rank))]
