"""Tensors of torch.save's files as streams, for the readers of formats that consist of such files."""

from pathlib import Path
from typing import Any

from ckpt_patches.audit import damages
from ckpt_patches.audit.checkpoint import Checkpoint, Extent, Record, Stream
from ckpt_patches.audit.damages import Finding
from ckpt_patches.formats import torch_file


def read(path: Path, found: Checkpoint, damage: damages.Kind = damages.BAD_FILE) -> Any:
    """What a file holds, and its checksums to the checkpoint's; None, and a finding, if it cannot be read."""
    try:
        file = torch_file.read(path, trust=True, checksums=True)  # runs nothing; unknown classes are stand-ins
    except torch_file.BadFileError as error:
        found.findings.append(Finding(damage, path.name, detail=str(error)))
        return None
    except torch_file.NotReadError as error:
        found.findings.append(Finding(damages.NOT_READ, path.name, detail=str(error)))
        return None
    found.records += [Record(str(path), *stored, (0, file.size)) for stored in file.storages]
    return file.value


def extent(path: Path, tensor: torch_file.TensorHeader, begin: int = 0, end: int | None = None) -> Extent:
    """The bytes of a contiguous tensor's elements."""
    end = tensor.numel if end is None else end
    return Extent(str(path), tensor.offset + begin * tensor.item_size, (end - begin) * tensor.item_size)


def stream(path: Path, array: str, tensor: torch_file.TensorHeader) -> Stream | None:
    """A whole tensor; None if its elements do not lie in order."""
    return Stream(array, tensor.dtype, (extent(path, tensor),)) if tensor.is_contiguous else None


def scalar(path: Path, value: Any) -> float | None:
    """A number, or the only element of a tensor."""
    if isinstance(value, (int, float)):
        return value
    if not isinstance(value, torch_file.TensorHeader) or value.numel != 1 or not value.is_known:
        return None
    return torch_file.number(value.dtype, torch_file.data_of(path, value))


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch_file.TensorHeader)
