"""Load a torch_dist checkpoint with torch, and rewrite its index, for tests that change it."""

import contextlib
import io
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.checkpoint import FileSystemReader, load

INDEX = ".metadata"


def loaded_by_torch(folder: Path) -> dict[str, torch.Tensor]:
    """All complete tensors, loaded in one process."""
    reader = FileSystemReader(folder)
    described = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in described.items()
        if hasattr(entry, "chunks")
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


class _Unpickler(pickle.Unpickler):
    """Replaces Megatron's classes by empty ones."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("megatron."):
            holder = sys.modules.setdefault(module, ModuleType(module))
            return vars(holder).setdefault(name, type(name, (), {"__module__": module}))
        return super().find_class(module, name)


@contextlib.contextmanager
def changed_index(folder: Path) -> Iterator[Any]:
    """The index; it is written back if the caller changes it."""
    path = folder / INDEX
    with patch.dict(sys.modules):
        index = _Unpickler(io.BytesIO(path.read_bytes())).load()
        before = pickle.dumps(index)
        yield index
        after = pickle.dumps(index)
    if after != before:
        path.write_bytes(after)
