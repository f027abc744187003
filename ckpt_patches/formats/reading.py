"""Choose the reader for a folder by its contents."""

from collections.abc import Callable
from pathlib import Path

from ckpt_patches.formats import (
    dcp_reader,
    fsdp_ranks_reader,
    megatron_arrays,
    megatron_torch_reader,
    plain_deepspeed_reader,
    safetensors_reader,
    torch_dist_reader,
    universal_reader,
    zarr_reader,
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
        return {"zarr": zarr_reader.read, "torch_dist": torch_dist_reader.read}.get(backend)
    if zero_reader.is_zero(path):
        return zero_reader.read
    if is_universal(path):
        return universal_reader.read
    if plain_deepspeed_reader.is_plain(path):
        return plain_deepspeed_reader.read
    if fsdp_ranks_reader.is_fsdp_ranks(path):
        return fsdp_ranks_reader.read
    if megatron_torch_folders(path):
        return megatron_torch_reader.read
    if is_dcp(path):
        return dcp_reader.read
    return safetensors_reader.read if safetensors_reader.is_safetensors(path) else None


# A subfolder can hold another checkpoint: DeepSpeed's for Transformers, an exported model for verl.
HAS_OTHERS_BELOW = (safetensors_reader.read, fsdp_ranks_reader.read)
