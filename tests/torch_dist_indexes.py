"""The index of a torch_dist checkpoint, read and written whole: for tests that change it."""

import contextlib
import io
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch.distributed.checkpoint.metadata  # noqa: F401  it is what an index is made of

INDEX = ".metadata"


class _Unpickler(pickle.Unpickler):
    """With empty classes in the place of Megatron's own."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("megatron."):
            holder = sys.modules.setdefault(module, ModuleType(module))
            return vars(holder).setdefault(name, type(name, (), {"__module__": module}))
        return super().find_class(module, name)


@contextlib.contextmanager
def changed_index(folder: Path) -> Iterator[Any]:
    """The index, which is written back if the caller has changed it."""
    path = folder / INDEX
    with patch.dict(sys.modules):
        index = _Unpickler(io.BytesIO(path.read_bytes())).load()
        before = pickle.dumps(index)
        yield index
        after = pickle.dumps(index)
    if after != before:
        path.write_bytes(after)
