"""An index whose repetitions are read as arrays is the one that Python's own unpickler reads."""

import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ckpt_patches.formats import repetitions, torch_dist
from ckpt_patches.formats.torch_dist import Index

SEEDS = range(6)
FOLDER = Path("/a/checkpoint")
LIMITS = [70_000, 3_000_000_000, 5 << 40]  # of offsets: two, four and more bytes


def metadata(seed: int, chunks: int = 60) -> Metadata:
    """Of a few tensors, as torch and megatron-core make it; what varies is drawn."""
    draw = random.Random(seed)
    described: dict[str, Any] = {}
    stored: list[tuple[MetadataIndex, _StorageInfo]] = []
    items: list[WriteItem] = []
    files = [f"__{rank}_0.distcp" for rank in range(4)]
    for number in range(6):
        name, axes = f"decoder.layers.{number}.weight", draw.randrange(5)
        places = {tuple(draw.randrange(draw.choice([1, 300, *LIMITS])) for _ in range(axes)) for _ in range(chunks)}
        sizes = torch.Size([draw.choice([1, 64, 1000]) for _ in range(axes)])
        own = [ChunkStorageMetadata(torch.Size(at), draw.choice([sizes, torch.Size(sizes)])) for at in places]
        properties = TensorProperties(dtype=draw.choice([torch.float32, torch.bfloat16]))
        described[name] = TensorStorageMetadata(properties, torch.Size([1 << 50] * axes), own)
        for hint, chunk in enumerate(own):
            offset = draw.choice([chunk.offsets, torch.Size(chunk.offsets)])
            index = MetadataIndex(name, offset, index=draw.choice([hint, None]) if seed % 2 else None)
            file = "".join([*draw.choice(files)]) if seed % 3 == 0 else draw.choice(files)
            if draw.random() > 0.03:  # a chunk in no file
                stored.append((index, _StorageInfo(file, draw.randrange(draw.choice(LIMITS)), 1200)))
            data = TensorWriteData(chunk=chunk, properties=replace(properties), size=torch.Size([1 << 50] * axes))
            planned = MetadataIndex(name, chunk.offsets, index=index.index)
            items.append(WriteItem(index=planned, type=WriteItemType.SHARD, tensor_data=data))
    for number in range(20):
        described[f"extra_state/shard_{number}_20"] = BytesStorageMetadata()
        stored.append((MetadataIndex(f"extra_state/shard_{number}_20"), _StorageInfo(files[0], number, 5)))
    if seed % 2:
        draw.shuffle(stored)
    made = Metadata(described, planner_data={name: (name,) for name in described}, storage_data=dict(stored))
    if seed % 4 > 1:
        shapes = {name: {"nd_reformulated_orig_global_shape": (4, 4)} for name in described}
        made.__dict__ |= {"mcore_data": shapes, "all_local_plans": [SavePlan(items[::2]), SavePlan(items[1::2])]}
    return made


def ordinary(data: bytes) -> Index:
    return torch_dist._index(FOLDER, torch_dist._load(data).fields)


def by_repetitions(data: bytes) -> tuple[Index, int]:
    """The same, and of how many objects it was in arrays."""
    loaded = repetitions.Loaded(data, torch_dist._found_class, torch_dist.REPEATED)
    index = torch_dist._index(FOLDER, loaded.value.fields, repetitions.starmap)
    loaded.check()
    return index, sum(run.count for run in loaded._runs)


def in_order(index: Index) -> Any:
    """All of an index, with the order of what it lists."""
    tensors = [(own, list(own.chunks.items()), list(own.places.items())) for own in index.tensors.values()]
    return tensors, list(index.objects.items()), index.absent


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_dist, "path_within", lambda folder, file: folder / file)
    monkeypatch.setattr(repetitions, "BLOCK", 5000)


@pytest.mark.quick
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("seed", SEEDS)
def test_an_index_is_the_same(seed: int, protocol: int) -> None:
    data = pickle.dumps(metadata(seed, chunks=400), protocol)
    found, repeated = by_repetitions(data)
    assert in_order(found) == in_order(ordinary(data))
    print(seed, protocol, len(data), repeated)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_index_is_the_same_or_refused(seed: int) -> None:
    whole, draw = pickle.dumps(metadata(seed), 2 + seed % 4), random.Random(seed)
    same = 0
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            at, length = draw.randrange(len(data)), draw.randrange(4)
            data[at : at + length] = draw.choice(
                [bytes(length), draw.randbytes(length), draw.choice(b"()0124RbuetaN2\x94").to_bytes(1, "big")]
            )
        try:
            found, _ = by_repetitions(bytes(data))
        except Exception:
            continue
        assert in_order(found) == in_order(ordinary(bytes(data)))
        same += 1
    assert same
    print(seed, same)
