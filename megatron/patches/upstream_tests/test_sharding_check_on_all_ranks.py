# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from unittest import mock

import pytest
import torch

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import validate_sharding_integrity


def _check(rank, key, layers):
    """Check a stack of two layers on this rank, of which the rank with the same number has these."""
    shards = [
        ShardedTensor.from_rank_offsets(key, torch.ones(4), (0, layer, 2)) for layer in layers
    ]
    with mock.patch("torch.distributed.get_rank", return_value=rank):
        validate_sharding_integrity([[shard] for shard in shards])


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_refuse_a_missing_layer(rank):
    with pytest.raises(CheckpointingException, match="Invalid access pattern") as error:
        _check(rank, "decoder.layers.weight", [1])
    assert "frozen" not in str(error.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_missing_optimizer_state_may_be_that_of_a_frozen_layer(rank):
    with pytest.raises(CheckpointingException, match="are they frozen"):
        _check(rank, "optimizer.state.exp_avg.decoder.layers.weight", [1])
