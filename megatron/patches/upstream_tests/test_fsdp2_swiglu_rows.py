# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

import inspect
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.core.dist_checkpointing import ShardedTensor, serialization
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.transformer import mlp

ROWS = 48  # of W and V
FC1, FC2 = (f"decoder.layers.0.mlp.linear_fc{number}.weight" for number in (1, 2))
SIZES = [(1, 2), (2, 2), (1, 4)]  # tensor-parallel, data-parallel
if "dp_group" not in inspect.signature(mlp.apply_swiglu_sharded_factory).parameters:
    SIZES += [(1, 3), (2, 3)]  # where odd numbers are supported


@pytest.fixture(autouse=True)
def without_torch_distributed(monkeypatch):
    for name in ("rank", "size"):
        if hasattr(mlp, f"get_pg_{name}"):
            monkeypatch.setattr(mlp, f"get_pg_{name}", lambda pg, name=name: getattr(pg, name)())


def group(rank, size):
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def factory(local, rank, tp_size, dp_size, key=FC1):
    """The factory of a rank's rows under FSDP2; ranks are numbered data-parallel first."""
    sh_ten = ShardedTensor.from_rank_offsets(key, local, (0, rank, tp_size * dp_size))
    sh_ten.is_torch_fsdp2_param = True
    sh_ten.fsdp2_dp_size = dp_size
    groups = {}
    if "dp_group" in inspect.signature(mlp.apply_swiglu_sharded_factory).parameters:
        groups["tp_group"] = group(rank // dp_size, tp_size)
        groups["dp_group"] = group(rank % dp_size, dp_size)
    return mlp.apply_swiglu_sharded_factory(sh_ten, (), **groups)


def tensor_metadata(size, parts):
    """A tensor of so many chunks along each axis."""
    chunk = [axis // count for axis, count in zip(size, parts)]
    offsets = [
        torch.Size([row * chunk[0], column * chunk[1]])
        for row in range(parts[0])
        for column in range(parts[1])
    ]
    chunks = [ChunkStorageMetadata(at, torch.Size(chunk)) for at in offsets]
    return TensorStorageMetadata(TensorProperties(), torch.Size(size), chunks)


def checkpoint(folder, chunks, tp_size, dp_size, ranks=()):
    """Metadata of a weight that is so many chunks, and, for each, of the rank that has saved it."""
    tensors = {
        FC1: tensor_metadata((ROWS, 4), (chunks, 1)),
        FC2: tensor_metadata((12, ROWS), (dp_size, tp_size)),
    }
    stored = {
        MetadataIndex(FC1, chunk.offsets): SimpleNamespace(relative_path=f"__{rank}_0.distcp")
        for chunk, rank in zip(tensors[FC1].chunks, ranks)
    }
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(tensors, storage_data=stored)))
    return str(folder)


def asked(rank, tp_size, dp_size, folder):
    """Row and number of rows of each part that a rank asks for."""
    local = torch.zeros(ROWS // (tp_size * dp_size), 4)
    state = {"w": factory(local, rank, tp_size, dp_size)}
    built = serialization.with_swiglu_rows_as_saved(state, folder)["w"].build()
    return [(part.global_offset[0], part.local_shape[0]) for part in built]


@pytest.mark.parametrize(("tp_size", "dp_size"), SIZES)
def test_rows_of_w_and_v_are_saved_in_their_places(tp_size, dp_size):
    w, v = torch.arange(ROWS * 4.0).reshape(ROWS, 4).chunk(2)
    local = [
        torch.cat([w.chunk(tp_size)[rank], v.chunk(tp_size)[rank]]).chunk(dp_size)
        for rank in range(tp_size)
    ]
    saved = torch.zeros(ROWS, 4)
    for rank in range(tp_size * dp_size):
        rows = local[rank // dp_size][rank % dp_size]
        for part in factory(rows, rank, tp_size, dp_size).build():
            start = part.global_offset[0]
            saved[start : start + len(part.data)] = part.data
    assert torch.equal(saved, torch.cat([w, v]))


@pytest.mark.parametrize(("tp_size", "dp_size"), SIZES)
def test_same_sizes_ask_for_mixed_rows_as_they_were_saved(tmp_path, tp_size, dp_size):
    shards = tp_size * dp_size
    folder = checkpoint(tmp_path, 2 * shards, tp_size, dp_size, [*range(shards), *range(shards)])
    half = ROWS // shards // 2
    for rank in range(shards):
        found = asked(rank, tp_size, dp_size, folder)
        assert found == [(rank * half, half), ((rank + shards) * half, half)]


def test_other_sizes_refuse_mixed_rows(tmp_path):
    folder = checkpoint(tmp_path, 4, 1, 2)
    for tp_size, dp_size in ((1, 1), (2, 1), (1, 4)):
        with pytest.raises(CheckpointingException, match="rows of W and V are mixed"):
            asked(0, tp_size, dp_size, folder)


WRITERS = [((0, 1, 2, 0, 1, 2), True), ((0, 0, 1, 1, 2, 2), False)]  # whether rows are mixed


@pytest.mark.parametrize(("ranks", "mixed"), WRITERS)
def test_writers_tell_for_an_odd_number_of_shards(tmp_path, ranks, mixed):
    folder = checkpoint(tmp_path, 6, 1, 3, ranks)
    if mixed:
        with pytest.raises(CheckpointingException, match="rows of W and V are mixed"):
            asked(0, 1, 2, folder)
    else:
        assert asked(0, 1, 2, folder) == [(0, ROWS // 2)]


def test_runs_without_fsdp2_refuse_mixed_rows(tmp_path):
    checkpoint(tmp_path, 4, 1, 2)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    fc1 = ShardedTensor.from_rank_offsets(FC1, torch.zeros(ROWS // 4, 4), (0, 0, 4))
    fc2 = ShardedTensor.from_rank_offsets(FC2, torch.zeros(12, ROWS // 2), (1, 0, 2))
    with pytest.raises(CheckpointingException, match="rows of W and V are mixed"):
        torch_dist.check_swiglu_rows(metadata, [fc1, fc2])
    of_fsdp2 = ShardedTensor.from_rank_offsets(FC2, torch.zeros(6, ROWS), (0, 0, 2))
    torch_dist.check_swiglu_rows(metadata, [fc1, of_fsdp2])
