"""The fingerprints of all tensors in Megatron's distributed checkpoints (torch_dist and zarr), under their names there.

An element has the same place in its tensor in all of these formats, whatever the parallelism of the run that saved.
Layers that are stacked into one tensor have one fingerprint. Buckets are left out, because the checkpoint does not
have their padding and the offsets of parameters.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from ckpt_patches.errors import UserError
from ckpt_patches.fingerprint.boxes import Box, of_box
from ckpt_patches.fingerprint.element_hash import MODULUS
from ckpt_patches.fingerprint.states import Fingerprint, bits_of, blocks, state_named
from ckpt_patches.formats import torch_dist, zarr
from ckpt_patches.formats.dtypes import FLOATS, item_size
from ckpt_patches.formats.megatron_names import OPTIMIZER_STATE, is_bucket
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.runtime.shown import shown

Stored = Mapping[str, torch_dist.Tensor | zarr.Array]  # a checkpoint's metadata of its tensors, by name


def is_megatron(path: Path) -> bool:
    """Whether a folder is one of these checkpoints."""
    return (path / torch_dist.INDEX).exists() or bool(zarr.arrays(path))


def read(path: Path) -> Stored:
    """The metadata of a checkpoint's tensors; reads no elements.

    Raises:
        UserError: its index or an array's metadata is damaged, or of an unsupported kind.
    """
    if (path / torch_dist.INDEX).exists():
        return torch_dist.read_index(path).tensors
    return {array.name: array for array in map(zarr.read_array, zarr.arrays(path))}


def check_complete(path: Path) -> None:
    """Check that a file has each entry of the index, and that no two entries are at the same bytes.

    Raises:
        UserError: an entry fails the check; the message names the first one.
    """
    if not (path / torch_dist.INDEX).exists():
        return
    check_entries(path, torch_dist.read_index(path))


def check_entries(path: Path, index: torch_dist.Index) -> None:
    """The same check for one index, or the merged index of several folders. Raises as `check_complete`."""
    absent = [name for name in index.absent if name != torch_dist.COMMON_OBJECT]
    wrong = [f"{shown(name)} is in the index, and in no file" for name in absent[:1]]
    wrong += [f"{shown(one)} and {shown(other)} are at the same bytes" for one, other in index.same_places()]
    if wrong:
        raise UserError(f"{path} is damaged or incomplete: {wrong[0]} (ckpt-patches audit)")


def left_out(stored: Stored) -> dict[str, str]:
    """The names of tensors without a fingerprint, and the reasons."""
    why = {name: _why_none(name, tensor.dtype) for name, tensor in sorted(stored.items())}
    return {name: reason for name, reason in why.items() if reason}


def _why_none(name: str, dtype: str) -> str | None:
    if is_bucket(name):
        return "a bucket, and where parameters begin in it is not in the checkpoint"
    return None if dtype in FLOATS else f"elements of {dtype}, expected {', '.join(FLOATS)}"


def fingerprints(path: Path, stored: Stored) -> Iterator[Fingerprint]:
    """The fingerprints of all tensors that are not left out, sorted by name.

    Raises:
        UserError: the checkpoint is damaged, or a chunk is missing.
    """
    with RangedFiles() as files:
        for name, tensor in sorted(stored.items()):
            if not _why_none(name, tensor.dtype):
                yield fingerprint(files, path, tensor)


def fingerprint(files: RangedFiles, path: Path, tensor: torch_dist.Tensor | zarr.Array) -> Fingerprint:
    """The fingerprint of one tensor that is not left out. Raises as `fingerprints`."""
    return Fingerprint(*parameter_and_state(tensor.name), *_of_tensor(files, path, tensor))


def parameter_and_state(name: str) -> tuple[str, str]:
    """Split a tensor's name: `optimizer.state.exp_avg.decoder.weight` is the state exp_avg of decoder.weight."""
    before, found, rest = name.partition(OPTIMIZER_STATE)
    state, _, parameter = rest.partition(".")
    return (f"{before}{parameter}", state_named(state)) if found and parameter else (name, "model")


def _of_tensor(files: RangedFiles, path: Path, tensor: torch_dist.Tensor | zarr.Array) -> tuple[int, int]:
    """The number of elements of a tensor, and their sum."""
    return _of_zarr(files, tensor) if isinstance(tensor, zarr.Array) else of_torch_dist(files, path, tensor)


def of_torch_dist(files: RangedFiles, path: Path, tensor: torch_dist.Tensor) -> tuple[int, int]:
    """The number of elements of a tensor, and their sum. Raises as `fingerprints`."""
    found, numel = 0, 0
    for offsets in tensor.chunks:
        if offsets not in tensor.places:
            raise UserError(f"{path}: the index has no place of the chunk {list(offsets)} of {tensor.name}")
        box, first, count = _of_chunk(tensor, offsets)
        header = torch_dist.read_chunk(files, path, tensor, offsets).value
        file = path / tensor.places[offsets].path
        found += _of_file(files, file, header.offset, tensor.dtype, box, first, count)
        numel += count
    expected = math.prod(tensor.whole or tensor.size)
    if numel != expected:
        raise UserError(f"{path}: expected {expected:,} elements of {tensor.name}, found {numel:,}")
    return numel, found % MODULUS


def _of_chunk(tensor: torch_dist.Tensor, offsets: torch_dist.Offsets) -> tuple[Box, int, int]:
    """The box that contains a chunk, the chunk's first element in it, and its length; a flattened chunk is no box."""
    if tensor.whole is None:
        box = Box(offsets, tensor.chunks[offsets], tensor.size)
        return box, 0, box.numel
    grid = tensor.size[: len(tensor.whole)]
    local = tuple(size // parts for size, parts in zip(tensor.whole, grid, strict=True))
    begin = tuple(index * size for index, size in zip(offsets, local, strict=False))
    return Box(begin, local, tensor.whole), offsets[-1], tensor.chunks[offsets][-1]


def _of_zarr(files: RangedFiles, array: zarr.Array) -> tuple[int, int]:
    if any(size % chunk for size, chunk in zip(array.shape, array.chunks, strict=True)):
        raise UserError(f"{array.path}: expected chunks {list(array.chunks)} to divide {list(array.shape)}")
    found = 0
    for offsets, label in array.places():
        box = Box(offsets, array.chunks, array.shape)
        found += _of_file(files, array.path / label, 0, array.dtype, box, 0, box.numel)
    return math.prod(array.shape), found % MODULUS


def _of_file(files: RangedFiles, path: Path, offset: int, dtype: str, box: Box, first: int, count: int) -> int:
    """The sum over `count` elements at a byte offset of a file; they are those of a box from its element `first` on."""
    found = 0
    for block in blocks(files, path, offset, count * item_size(dtype)):
        bits = bits_of(block, dtype)
        found += of_box(bits, first, box)
        first += len(bits)
    return found
