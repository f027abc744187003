# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import os
import time

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine

from unit.common import DistributedTest

CONFIG = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
SECONDS_LATE = 2


class LateOnTheLastRank(TorchCheckpointEngine):
    """Notes there what `latest` names when it begins to write."""

    def __init__(self, folder):
        super().__init__(None)
        self.folder = folder
        self.named = set()

    def save(self, *args, **kwargs):
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(SECONDS_LATE)
            self.named.add(_latest(self.folder))
        return super().save(*args, **kwargs)


class InTheBackground(LateOnTheLastRank):
    """Writes what it was given to save when that is committed."""

    def __init__(self, folder):
        super().__init__(folder)
        self.commit_info = None
        self.calls = []

    def is_decoupled(self):
        return True

    def create(self, info):
        self.commit_info = info

    def get_commit_info(self):
        return self.commit_info

    def save(self, *args, **kwargs):
        self.calls.append((args, kwargs))

    def commit(self, info):
        for args, kwargs in self.calls:
            super().save(*args, **kwargs)
        return True


def _latest(folder):
    with open(os.path.join(folder, "latest")) as file:
        return file.read()


class TestLatestAfterAllRanks(DistributedTest):
    world_size = 2

    def _save(self, checkpoint_engine, folder):
        """A checkpoint by DeepSpeed's own engine, and another one by this."""
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
        engine.save_checkpoint(folder, tag="old")
        engine.checkpoint_engine = checkpoint_engine
        engine.save_checkpoint(folder, tag="new")
        return engine

    def _check(self, checkpoint_engine, folder):
        is_late = dist.get_rank() == self.world_size - 1
        assert checkpoint_engine.named == ({"old"} if is_late else set())
        assert _latest(folder) == "new"

    def test_latest_is_the_old_one_until_all_ranks_have_written(self, tmpdir):
        checkpoint_engine = LateOnTheLastRank(str(tmpdir))
        self._save(checkpoint_engine, str(tmpdir))
        self._check(checkpoint_engine, str(tmpdir))

    @pytest.mark.skipif(not hasattr(DeepSpeedEngine, "_commit_decoupled_checkpoint"),
                        reason="all checkpoint engines write at once")
    def test_so_it_is_where_they_write_in_the_background(self, tmpdir):
        checkpoint_engine = InTheBackground(str(tmpdir))
        self._save(checkpoint_engine, str(tmpdir))._commit_decoupled_checkpoint()
        self._check(checkpoint_engine, str(tmpdir))
