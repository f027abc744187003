"""Choose the reader for a folder by its contents."""

from collections.abc import Callable
from pathlib import Path

from ckpt_patches.formats import (
    dcp_reader,
    deepspeed_files,
    files_reader,
    megatron_arrays,
    megatron_torch,
    rank_files_reader,
    torch_dist_reader,
    universal,
    zarr,
    zero_reader,
)
from ckpt_patches.formats.checkpoint import Checkpoint
from ckpt_patches.formats.dcp import is_dcp
from ckpt_patches.formats.megatron_torch import folders as megatron_torch_folders
from ckpt_patches.formats.universal import is_universal


def reader_of(path: Path) -> Callable[[Path], Checkpoint] | None:
    """The reader for a checkpoint; None if the folder's format is unknown."""
    backend = megatron_arrays.backend(path)
    if backend is not None:
        return {"zarr": zarr.read, "torch_dist": torch_dist_reader.read}.get(backend)
    if zero_reader.is_zero(path):
        return zero_reader.read
    if is_universal(path):
        return universal.read
    if deepspeed_files.is_without_zero(path):
        return deepspeed_files.read
    if rank_files_reader.is_rank_files(path):
        return rank_files_reader.read
    if megatron_torch_folders(path):
        return megatron_torch.read
    if is_dcp(path):
        return dcp_reader.read
    if files_reader.is_local(path):
        return files_reader.read_local
    return files_reader.read if files_reader.is_files(path) else None


# A subfolder can hold another checkpoint: DeepSpeed's for Transformers, an exported model for verl.
HAS_OTHERS_BELOW = (files_reader.read, rank_files_reader.read)
