"""Choose the reader for a folder by its contents; say what a path is that no reader takes."""

from collections.abc import Callable
from pathlib import Path

from ckpt_patches.errors import UserError
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
from ckpt_patches.formats.trackers import TRACKERS, named_in
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

MOST_ENTRIES = 10_000  # of a folder that are looked at


def wrong_path(path: Path, expected: str = "a checkpoint in a known format") -> UserError:
    """The error for a path that is not what a command expects, in one form for all; with the checkpoint to name."""
    found, hint = "nothing", ""
    if path.is_dir():
        entries = [entry for entry, _ in zip(path.iterdir(), range(MOST_ENTRIES), strict=False)]
        below = [entry.name for entry in entries if entry.is_dir() and _is_checkpoint(entry)]
        below.sort(key=lambda name: (len(name), name))  # global_step9 before global_step10
        found = "none in this folder" if not below else f"a folder of {len(below)}"
        hint = f"; name one, such as {path / below[-1]}" if below else " (ckpt-patches explain formats)"
    elif path.exists():
        names = named_in(path) if path.name in TRACKERS else None
        found = "a tracker" if names else "a file"
        hint = f"; it names {names}" if names else ""
    return UserError(f"{path}: expected {expected}, found {found}{hint}")


def _is_checkpoint(path: Path) -> bool:
    try:
        return reader_of(path) is not None
    except (OSError, UserError):
        return False
