# Copyright (c) 2025, NVIDIA CORPORATION. All rights reserved.

import importlib

import numpy as np
import pytest
import torch

from megatron.core.dist_checkpointing import ShardedTensor

SHAPE = (4, 3)
NUMEL = 12


@pytest.fixture(autouse=True)
def numpy_2(monkeypatch):
    """NumPy 1 still has the alias, with a warning from 1.25 on."""
    monkeypatch.delattr(np, "product", raising=False)


def _flattened_shard(start, stop):
    return ShardedTensor(
        "weight",
        torch.arange(start, stop, dtype=torch.float32),
        torch.float32,
        SHAPE,
        SHAPE,
        (0, 0),
        (1, 1),
        replica_id=0,
        flattened_range=slice(start, stop),
    )


def _function(name):
    """A helper, in whichever of these modules it is."""
    modules = ("exchange_utils", "strategies.fully_parallel", "validation", "serialization")
    for module_name in modules:
        try:
            module = importlib.import_module(f"megatron.core.dist_checkpointing.{module_name}")
        except ModuleNotFoundError:
            continue
        if hasattr(module, name):
            return getattr(module, name)
    pytest.skip(f"there is no {name}")


def test_global_coordinates_of_flattened_shard():
    rows, columns = _flattened_shard(4, 9).global_coordinates()
    assert list(rows * SHAPE[1] + columns) == [4, 5, 6, 7, 8]


def test_size_of_shard():
    shard = ShardedTensor.from_rank_offsets("weight", torch.zeros(SHAPE))
    assert _function("_shard_size")(shard) == NUMEL * 4


def test_validation_of_flattened_shards():
    validate = _function("_validate_sharding_for_key_flattened")
    validate([_flattened_shard(0, 5), _flattened_shard(5, NUMEL)])
    with pytest.raises(Exception, match="weight"):
        validate([_flattened_shard(0, 5), _flattened_shard(5, NUMEL - 1)])
