# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

from types import SimpleNamespace

import pytest
import torch

import deepspeed.runtime.engine as ds_engine
from deepspeed.runtime.engine import DeepSpeedEngine


class CheckpointEngine:
    """One that has nothing to write."""

    def __init__(self, is_decoupled):
        self.is_decoupled = lambda: is_decoupled
        self.get_commit_info = lambda: SimpleNamespace(tag="new", save_dir=self.save_dir, save_latest=True)

    def makedirs(self, path, exist_ok=False):
        self.save_dir = path

    def create(self, *args):
        self.has_committed = False

    def commit(self, *args):
        self.has_committed = True


@pytest.fixture
def barriers(tmp_path, monkeypatch):
    """What `latest` names, and whether all is written, whenever ranks wait for each other."""
    found = []
    (tmp_path / "latest").write_text("old")

    def barrier():
        found.append(((tmp_path / "latest").read_text(), checkpoint_engine.has_committed))

    checkpoint_engine = CheckpointEngine(is_decoupled=False)
    checkpoint_engine.create()
    monkeypatch.setattr(ds_engine.dist, "barrier", barrier)
    return SimpleNamespace(found=found, checkpoint_engine=checkpoint_engine)


def _engine(checkpoint_engine):
    """What a save needs of an engine, on rank 0."""
    engine = DeepSpeedEngine.__new__(DeepSpeedEngine)
    torch.nn.Module.__init__(engine)
    engine.checkpoint_engine = checkpoint_engine
    engine.global_rank = 0
    engine.global_steps = 1
    engine.has_moe_layers = False
    engine.save_zero_checkpoint = False
    engine.optimizer = None
    for answer in ("_optimizer_has_ckpt_event_prologue", "_optimizer_has_ckpt_event_epilogue",
                   "use_node_local_storage", "zero_nvme_offload_optimizer", "zero_optimization_partition_gradients",
                   "_checkpoint_tag_validation", "_create_checkpoint_file", "_save_checkpoint"):
        setattr(engine, answer, lambda *args, **kwargs: False)
    engine.zero_optimization_stage = lambda: 0
    return engine


def test_all_ranks_have_written_before_latest_names_their_checkpoint(barriers, tmp_path):
    _engine(barriers.checkpoint_engine).save_checkpoint(str(tmp_path), tag="new")
    assert (tmp_path / "latest").read_text() == "new"
    assert barriers.found[-2:] == [("old", True), ("new", True)]


@pytest.mark.skipif(not hasattr(DeepSpeedEngine, "_commit_decoupled_checkpoint"), reason="all engines write at once")
def test_so_they_have_where_they_write_in_the_background(barriers, tmp_path):
    barriers.checkpoint_engine.is_decoupled = lambda: True
    engine = _engine(barriers.checkpoint_engine)
    engine.save_checkpoint(str(tmp_path), tag="new")
    barriers.found.clear()
    engine._commit_decoupled_checkpoint()
    assert (tmp_path / "latest").read_text() == "new"
    assert barriers.found == [("old", True), ("new", True)]
