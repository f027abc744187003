"""Handmade old checkpoints: optimizer state in flattened ranges, as megatron-core up to 0.15 saves it."""

import io
import json
import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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

Shape = tuple[int, ...]
STATES = ("fp32_param", "exp_avg", "exp_avg_sq")
CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass
class Old:
    """A checkpoint that is written chunk by chunk; `write` adds its index."""

    folder: Path
    metadata: Metadata = field(default_factory=lambda: Metadata({}, storage_data={}))
    wholes: dict[str, dict[str, Shape]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def tensor(self, name: str, dtype: torch.dtype, size: Shape, whole: Shape | None = None) -> None:
        properties = TensorProperties(dtype=dtype)
        self.metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size(size), [])
        if whole is not None:
            self.wholes[name] = {"nd_reformulated_orig_global_shape": whole}

    def chunk(self, name: str, offsets: Shape, data: torch.Tensor, rank: int = 0) -> None:
        entry = self.metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), data.shape))
        self.metadata.storage_data[MetadataIndex(name, offsets)] = self._stored(data.clone(), rank)

    def object(self, key: str, value: Any) -> None:
        self.metadata.state_dict_metadata[key] = BytesStorageMetadata()
        self.metadata.storage_data[MetadataIndex(key)] = self._stored([value], 0)

    def _stored(self, value: Any, rank: int) -> _StorageInfo:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        name = f"__{rank}_0.distcp"
        with open(self.folder / name, "ab") as file:
            begin = file.tell()
            file.write(buffer.getbuffer())
        return _StorageInfo(name, begin, len(buffer.getbuffer()))

    def write(self, common: dict[str, Any]) -> Path:
        vars(self.metadata)["mcore_data"] = self.wholes
        (self.folder / ".metadata").write_bytes(pickle.dumps(self.metadata))
        (self.folder / "metadata.json").write_text(json.dumps(CONFIG))
        torch.save(common, self.folder / "common.pt")
        return self.folder


def settings(*steps: int | None, kind: str = "fully_sharded_model_space") -> dict[str, Any]:
    """The common state, with a param group for each step."""
    decays = [(step, float(number == 0)) for number, step in enumerate(steps or (3, 3))]
    groups = [{"wd_mult": decay, "lr_mult": 1.0, "betas": (0.9, 0.999), "step": step} for step, decay in decays]
    return {"optimizer": {"optimizer": {"param_groups": groups}, "param_state_sharding_type": kind}}


def flattened(
    folder: Path, shapes: dict[str, Shape], fragments: dict[str, Shape] | None = None, ranks: int = 2
) -> tuple[Old, dict[str, torch.Tensor]]:
    """A checkpoint without its index, and its tensors' values; data-parallel ranks have even parts of each shard."""
    old, truth = Old(folder), {}
    for number, (name, shape) in enumerate(shapes.items()):
        cut = (fragments or {}).get(name, (1,) * len(shape))
        for role, whole in _values(shape, number).items():
            key = name if role == "weight" else f"optimizer.state.{role}.{name}"
            truth[key] = whole
            local = tuple(n // parts for n, parts in zip(shape, cut, strict=True))
            if role == "weight":
                old.tensor(key, whole.dtype, shape)
            else:
                old.tensor(key, whole.dtype, (*cut, math.prod(local)), shape)
            for index, shard in _shards(whole, cut):
                if role == "weight":
                    old.chunk(key, tuple(i * n for i, n in zip(index, local, strict=True)), shard)
                    continue
                begin = 0
                for rank, part in enumerate(shard.reshape(-1).tensor_split(ranks)):
                    old.chunk(key, (*index, begin), part.reshape((*(1,) * len(shape), -1)), rank)
                    begin += part.numel()
    return old, truth


def _values(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    """A weight, its main parameter and its moments, after a step that changed every element."""
    master = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02
    gradient = master * 0.01 + 1e-4
    states = dict(zip(STATES, (master, gradient, gradient.square()), strict=True))
    return {"weight": master.to(torch.bfloat16), **states}


def _shards(whole: torch.Tensor, cut: Shape) -> Iterator[tuple[Shape, torch.Tensor]]:
    parts: list[tuple[Shape, torch.Tensor]] = [((), whole)]
    for axis, count in enumerate(cut):
        parts = [
            ((*index, number), part)
            for index, own in parts
            for number, part in enumerate(own.tensor_split(count, dim=axis))
        ]
    yield from parts
