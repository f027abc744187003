"""Reading an index with its repetitions as arrays gives the same result as Python's own unpickler."""

import pickle
import pickletools
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
from ckpt_patches.formats.torch_file import BadFileError

SEEDS = range(6)
AXES, CHUNKS = 6, 150  # tensors of zero to five axes; chunks per tensor
FOLDER = Path("/a/checkpoint")
LIMITS = [70_000, 3_000_000_000, 5 << 40]  # of offsets: two, four and more bytes


def metadata(seed: int, chunks: int = CHUNKS) -> Metadata:
    """Random metadata of a few tensors, in the form that torch and megatron-core write."""
    draw = random.Random(seed)
    described: dict[str, Any] = {}
    stored: list[tuple[MetadataIndex, _StorageInfo]] = []
    items: list[WriteItem] = []
    files = [f"__{rank}_0.distcp" for rank in range(4)]
    for axes in range(AXES):
        name = f"decoder.layers.{axes}.weight"
        places = {tuple(draw.randrange(draw.choice([1, 300, *LIMITS])) for _ in range(axes)) for _ in range(chunks)}
        sizes = torch.Size([draw.choice([1, 64, 1000]) for _ in range(axes)])
        own = [ChunkStorageMetadata(torch.Size(at), draw.choice([sizes, torch.Size(sizes)])) for at in places]
        properties = TensorProperties(dtype=draw.choice([torch.float32, torch.bfloat16]))
        described[name] = TensorStorageMetadata(properties, torch.Size([1 << 50] * axes), own)
        for hint, chunk in enumerate(own):
            index = MetadataIndex(name, chunk.offsets, index=draw.choice([hint, None]) if seed % 2 else None)
            if seed > 3:
                object.__setattr__(index, "offset", chunk.offsets)  # the same object, but torch creates a copy
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
    """The index from the repetitions reader, and the number of objects that it read as arrays."""
    loaded = repetitions.Loaded(data, torch_dist._found_class, torch_dist.REPEATED)
    index = torch_dist._index(FOLDER, loaded.value.fields, repetitions.starmap)
    loaded.check()
    return index, sum(run.count for run in loaded._runs)


def in_order(index: Index) -> Any:
    """All content of an index, in stored order."""
    tensors = [(own, list(own.chunks.items()), list(own.places.items())) for own in index.tensors.values()]
    return tensors, list(index.objects.items()), index.absent


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the check for the folder, and use the reader for large indexes and several blocks from a few KiB on."""
    monkeypatch.setattr(torch_dist, "path_within", lambda folder, file: folder / file)
    monkeypatch.setattr(torch_dist, "LARGE", 0)
    monkeypatch.setattr(repetitions, "BLOCK", 5000)


@pytest.mark.quick
@pytest.mark.parametrize("protocol", range(4, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("seed", SEEDS)
def test_an_index_is_the_same(seed: int, protocol: int) -> None:
    made = metadata(seed)
    data = pickle.dumps(made, protocol)
    found, repeated = by_repetitions(data)
    assert in_order(found) == in_order(ordinary(data))
    listed = sum(len(tensor.chunks) for tensor in found.tensors.values())
    planned = sum(len(plan.items) for plan in vars(made).get("all_local_plans", []))
    assert repeated > 0.8 * (listed + len(made.storage_data) + planned)


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_index_is_the_same_or_refused(seed: int) -> None:
    whole, draw = pickle.dumps(metadata(seed, chunks=14), 4 + seed % 2), random.Random(seed)
    opcodes = [at for _, _, at in pickletools.genops(whole) if at is not None]
    same = 0
    for _ in range(150):
        data, at = bytearray(whole), draw.choice(opcodes)
        first = draw.randrange(len(opcodes) - 80)
        copied = whole[opcodes[first] : opcodes[first + draw.randrange(80)]]
        data[at:at] = draw.choice([b"", copied, *(bytes([code]) for code in b"()012NRabdelostu]}\x85\x86\x94")])
        data[at : at + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        try:
            found, _ = by_repetitions(bytes(data))
        except Exception:
            continue
        assert in_order(found) == in_order(ordinary(bytes(data)))
        same += 1
    assert same


@pytest.mark.parametrize("more", ["within a number", 1, 1 << 40])
def test_a_frame_that_ends_within_an_opcode_is_refused(more: int | str) -> None:
    """A frame that ends within an opcode is refused: Python's unpickler would not follow the opcodes."""
    data = pickle.dumps(metadata(0), 4)
    assert data[2:3] == pickle.FRAME
    end = 11 + int.from_bytes(data[3:11], "little")
    inside = max(at for opcode, _, at in pickletools.genops(data) if opcode.code == "J" and at is not None and at < end)
    end = inside + 2 if isinstance(more, str) else end + more
    with pytest.raises(repetitions.IrregularError, match=r"frame|other opcodes"):
        by_repetitions(data[:3] + (end - 11).to_bytes(8, "little") + data[11:])


def index_file(folder: Path, data: bytes) -> Path:
    (folder / torch_dist.INDEX).write_bytes(data)
    return folder


def test_a_large_index_is_read_by_its_repetitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(metadata(0))
    expected = ordinary(data)
    monkeypatch.setattr(torch_dist, "_load", None)
    assert in_order(torch_dist.read_index(index_file(tmp_path, data))) == in_order(expected)


def test_what_is_no_repetition_is_read_the_ordinary_way(tmp_path: Path) -> None:
    """The ordinary reader is used for plans that share index objects with `storage_data`."""
    made = metadata(0)
    items = [WriteItem(index=index, type=WriteItemType.SHARD) for index in made.storage_data]
    vars(made)["all_local_plans"] = [SavePlan(items)]
    data = pickle.dumps(made)
    with pytest.raises(repetitions.IrregularError):
        by_repetitions(data)
    assert in_order(torch_dist.read_index(index_file(tmp_path, data))) == in_order(ordinary(data))


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_protocol_with_numbered_slots_is_read_the_ordinary_way(protocol: int, tmp_path: Path) -> None:
    data = pickle.dumps(metadata(1), protocol)
    with pytest.raises(repetitions.IrregularError):
        by_repetitions(data)
    assert in_order(torch_dist.read_index(index_file(tmp_path, data))) == in_order(ordinary(data))


def test_an_index_that_ends_early_is_corrupt(tmp_path: Path) -> None:
    data = pickle.dumps(metadata(1))
    for end in (len(data) - 1, len(data) // 2, 100):
        with pytest.raises(BadFileError):
            torch_dist.read_index(index_file(tmp_path, data[:end]))


HOSTILE = {
    "marks": b"(" * 1000,
    "no repetitions": b"N0" * 500,
    "many kinds of objects": b"\x8c\x01m\x94\x8c\x0dMetadataIndex\x94\x93\x94"
    + b"".join(b"h\x02)\x81" + b"N" * length for length in range(1, 60)),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_would_take_long_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repetitions, "SPARE", 500 if what != "many kinds of objects" else 1 << 20)
    monkeypatch.setattr(repetitions, "MOST_TEMPLATES", 50)
    with pytest.raises(repetitions.IrregularError, match=r"other opcodes|too many kinds"):
        by_repetitions(HOSTILE[what] + b".")
