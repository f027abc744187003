# Copyright (c) 2025, NVIDIA CORPORATION. All rights reserved.

import itertools
import os

import pytest
import torch

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import zarr as zarr_strategy

zarr = pytest.importorskip("zarr")
if not hasattr(zarr, "ProcessSynchronizer"):
    pytest.skip("needs zarr < 3", allow_module_level=True)

SHAPE = (4, 6)
CUTS = (0, 5, 14, 24)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args, **kwargs: None)
    if torch.distributed.is_initialized():
        yield
        return
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def _shards(dtype=torch.float32):
    """The flattened ranges of a tensor, all of them on this rank."""
    whole = torch.arange(24).to(dtype)
    shards = {
        str(start): ShardedTensor(
            "weight",
            whole[start:stop].clone(),
            dtype,
            SHAPE,
            SHAPE,
            (0, 0),
            (1, 1),
            replica_id=0,
            flattened_range=slice(start, stop),
        )
        for start, stop in itertools.pairwise(CUTS)
    }
    return whole, shards


def _save(shards, folder):
    zarr_strategy.ZarrSaveShardedStrategy("zarr", 1).save(shards, folder)


def test_ranges_are_written_without_reading_and_without_locks(tmp_path, monkeypatch):
    monkeypatch.delattr(zarr.Array, "set_coordinate_selection")
    whole, shards = _shards()
    _save(shards, tmp_path)
    assert (tmp_path / "weight" / "0.0").read_bytes() == whole.numpy().tobytes()
    assert [path.name for path in tmp_path.iterdir()] == ["weight"]


def test_bfloat16_is_stored_as_it_is(tmp_path):
    pytest.importorskip("tensorstore")  # brings NumPy the type
    whole, shards = _shards(torch.bfloat16)
    _save(shards, tmp_path)
    assert (tmp_path / "weight" / "0.0").read_bytes() == whole.view(torch.uint8).numpy().tobytes()


def test_short_chunk_file_is_an_error(tmp_path, monkeypatch):
    truncate = os.ftruncate
    monkeypatch.setattr(os, "ftruncate", lambda file, size: truncate(file, size - 1))
    with pytest.raises(CheckpointingException, match="expected a chunk file of 96 bytes, found 95"):
        _save(_shards()[1], tmp_path)
