# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import pytest
import torch
from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import DecoupledCheckpointEngine
from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine
from deepspeed.runtime.zero.config import ZeroStageEnum


@pytest.mark.parametrize("engine", [FastCheckpointEngine, DecoupledCheckpointEngine])
def test_a_file_with_a_class_of_deepspeed(engine, tmp_path):
    path = str(tmp_path / "states.pt")
    torch.save({"zero_stage": ZeroStageEnum.weights}, path)

    loaded = engine.load(engine.__new__(engine), path, map_location="cpu")

    assert loaded == {"zero_stage": ZeroStageEnum.weights}
