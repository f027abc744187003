# Copyright (c) 2025, NVIDIA CORPORATION. All rights reserved.

import threading

import pytest
import torch

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies import zarr as zarr_strategy

zarr = pytest.importorskip("zarr")
if not hasattr(zarr, "ProcessSynchronizer"):
    pytest.skip("needs zarr < 3", allow_module_level=True)

SHAPE = (4, 6)
NUMEL = 24
# Seconds that the creator holds its chunk. With a lock, the other writer waits for it.
PATIENCE = 0.5


def _flattened_shard(rank, world_size):
    numel = NUMEL // world_size
    return ShardedTensor(
        "weight",
        torch.full((numel,), float(rank + 1)),
        torch.float32,
        SHAPE,
        SHAPE,
        (0, 0),
        (1, 1),
        replica_id=0,
        flattened_range=slice(rank * numel, (rank + 1) * numel),
    )


@pytest.fixture
def ranks_as_threads(monkeypatch):
    """Two threads in place of two ranks; locks are between threads, not between processes."""
    barrier = threading.Barrier(2, timeout=30)
    synchronizers = {}
    guard = threading.Lock()

    def synchronizer_of(path):
        with guard:
            return synchronizers.setdefault(path, zarr.ThreadSynchronizer())

    monkeypatch.setattr(zarr, "ProcessSynchronizer", synchronizer_of)
    monkeypatch.setattr(torch.distributed, "barrier", lambda *args, **kwargs: barrier.wait())
    # In case ranks tell each other in a barrier whether they failed.
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: barrier.wait())
    monkeypatch.setattr(torch.distributed, "get_backend", lambda *args, **kwargs: "gloo")
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *args, **kwargs: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args, **kwargs: None)


@pytest.fixture
def race(monkeypatch):
    """The other writer writes while the creator is between its read and its write of the chunk."""
    has_read, has_written = threading.Event(), threading.Event()
    read_chunk = zarr.Array._process_for_setitem
    write = zarr.Array.set_coordinate_selection

    def write_in_turn(self, *args, **kwargs):
        if threading.current_thread().name != "creator":
            assert has_read.wait(30)
        write(self, *args, **kwargs)
        if threading.current_thread().name != "creator":
            has_written.set()

    def read_and_wait(self, *args, **kwargs):
        chunk = read_chunk(self, *args, **kwargs)
        if threading.current_thread().name == "creator":
            has_read.set()
            has_written.wait(PATIENCE)
        return chunk

    monkeypatch.setattr(zarr.Array, "set_coordinate_selection", write_in_turn)
    monkeypatch.setattr(zarr.Array, "_process_for_setitem", read_and_wait)


def test_creator_does_not_overwrite_other_slices(tmp_path, ranks_as_threads, race):
    strategy = zarr_strategy.ZarrSaveShardedStrategy("zarr", 1)
    writers = []
    for rank, name in enumerate(("creator", "other")):
        args = ({"weight": _flattened_shard(rank, 2)}, tmp_path)
        writers.append(threading.Thread(target=strategy.save, args=args, name=name))
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()

    saved = torch.from_numpy(zarr.open(str(tmp_path / "weight"), "r")[:]).flatten()
    expected = torch.cat([_flattened_shard(rank, 2).data for rank in range(2)])
    assert torch.equal(saved, expected)


def test_lock_directory_is_not_an_array(tmp_path, monkeypatch):
    for collective in ("barrier", "all_reduce"):
        monkeypatch.setattr(torch.distributed, collective, lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda *args, **kwargs: "gloo")
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *args, **kwargs: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args, **kwargs: None)
    shard = _flattened_shard(0, 1)
    zarr_strategy.ZarrSaveShardedStrategy("zarr", 1).save({"weight": shard}, tmp_path)
    # The writers that open an array lock its `.zarray` as well, with a file of that name.
    locks = tmp_path / "weight.sync"
    zarr.open(str(tmp_path / "weight"), "r+", synchronizer=zarr.ProcessSynchronizer(str(locks)))
    assert (locks / ".zarray").exists()

    metadata = zarr_strategy.ZarrLoadShardedStrategy().load_tensors_metadata(tmp_path)
    assert list(metadata) == ["weight"]
