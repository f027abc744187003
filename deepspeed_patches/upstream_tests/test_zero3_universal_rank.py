# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.zero import stage3

WORLD_SIZE = 4


@pytest.mark.parametrize("ranks_per_node", [1, 2, WORLD_SIZE])
@pytest.mark.parametrize("numel", [1, 8, 11])
def test_ranks_of_all_nodes_have_the_whole_tensor(tmp_path, monkeypatch, ranks_per_node, numel):
    saved = torch.arange(1.0, numel + 1)
    torch.save(saved, tmp_path / "fp32.pt")
    optimizer = SimpleNamespace(dp_process_group=object())
    monkeypatch.setattr(stage3.dist, "get_world_size", lambda group: WORLD_SIZE)

    partitions = []
    for rank in range(WORLD_SIZE):
        monkeypatch.setattr(stage3.dist, "get_rank", lambda group, rank=rank: rank)
        monkeypatch.setattr(stage3.dist, "get_local_rank", lambda rank=rank: rank % ranks_per_node)
        load = stage3.DeepSpeedZeroOptimizer_Stage3.load_hp_checkpoint_state
        partitions.append(load(optimizer, str(tmp_path), "fp32"))

    padding = torch.zeros(-numel % WORLD_SIZE)
    assert torch.equal(torch.cat(partitions), torch.cat([saved, padding]))
