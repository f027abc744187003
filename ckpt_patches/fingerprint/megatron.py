"""The fingerprints of Megatron's distributed checkpoints, torch_dist and zarr: of every tensor, as it is named there.

Its place in a tensor is the same in all of these formats, whatever the parallelism of the run that saved. Layers that
are stacked into one tensor are one. Buckets are left out: which of their elements are padding, and where parameters
begin, is not in the checkpoint.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from ckpt_patches.errors import UserError
from ckpt_patches.fingerprint.boxes import Box, of_box
from ckpt_patches.fingerprint.mix import MODULUS
from ckpt_patches.fingerprint.states import BLOCK, FLOATS, Fingerprint, bits_of, state_named
from ckpt_patches.formats import torch_dist, zarr
from ckpt_patches.formats.dtypes import item_size
from ckpt_patches.formats.ranged import RangedFiles

BUCKETS = "optimizer.distributed."
STATE = "optimizer.state."  # then the state's name, and the parameter's


def is_megatron(path: Path) -> bool:
    """Whether a folder is one of these checkpoints."""
    return (path / torch_dist.INDEX).exists() or (path.is_dir() and bool(zarr.arrays(path)))


def fingerprints(path: Path) -> Iterator[Fingerprint]:
    """Of every tensor of floats but for buckets, in the order of their names.

    Raises:
        UserError: the checkpoint is damaged, or a chunk is missing.
    """
    if (path / torch_dist.INDEX).exists():
        yield from _of_torch_dist(path)
    else:
        yield from _of_zarr(path)


def left_out(path: Path) -> list[str]:
    """The names of buckets, which have none."""
    index = (path / torch_dist.INDEX).exists()
    names = torch_dist.read_index(path).tensors if index else [array.name for array in zarr.arrays(path)]
    return sorted(name for name in names if BUCKETS in name)


def parameter_and_state(name: str) -> tuple[str, str]:
    """Of a tensor's name: `optimizer.state.exp_avg.decoder.weight` is the state exp_avg of decoder.weight."""
    before, found, rest = name.partition(STATE)
    state, _, parameter = rest.partition(".")
    return (f"{before}{parameter}", state_named(state)) if found and parameter else (name, "model")


def _of_torch_dist(path: Path) -> Iterator[Fingerprint]:
    index = torch_dist.read_index(path)
    with RangedFiles() as files:
        for name, tensor in sorted(index.tensors.items()):
            if tensor.dtype not in FLOATS or BUCKETS in name:
                continue
            shape, found, numel = tensor.whole or tensor.size, 0, 0
            for offsets in tensor.chunks:
                if offsets not in tensor.places:
                    raise UserError(f"{path}: the index has no place of the chunk {list(offsets)} of {name}")
                box, first, count = _of_chunk(tensor, offsets)
                header = torch_dist.read_chunk(files, path, tensor, offsets).value
                file = str(path / tensor.places[offsets].file)
                found += _of_file(files, file, header.offset, tensor.dtype, box, first, count)
                numel += count
            _check_numel(path, name, numel, shape)
            yield Fingerprint(*parameter_and_state(name), numel, found % MODULUS)


def _of_chunk(tensor: torch_dist.Tensor, offsets: torch_dist.Offsets) -> tuple[Box, int, int]:
    """The box that a chunk lies in, its first element there, and how many it has; a flattened one is no box itself."""
    if tensor.whole is None:
        box = Box(offsets, tensor.chunks[offsets], tensor.size)
        return box, 0, box.numel
    grid = tensor.size[: len(tensor.whole)]
    local = tuple(size // parts for size, parts in zip(tensor.whole, grid, strict=True))
    begin = tuple(index * size for index, size in zip(offsets, local, strict=False))
    return Box(begin, local, tensor.whole), offsets[-1], tensor.chunks[offsets][-1]


def _of_zarr(path: Path) -> Iterator[Fingerprint]:
    with RangedFiles() as files:
        for array in map(zarr.read_array, zarr.arrays(path)):
            if array.dtype not in FLOATS or BUCKETS in array.name:
                continue
            if any(size % chunk for size, chunk in zip(array.shape, array.chunks, strict=True)):
                raise UserError(f"{array.path}: expected chunks {list(array.chunks)} to divide {list(array.shape)}")
            found = 0
            for offsets, label in array.places():
                box = Box(offsets, array.chunks, array.shape)
                found += _of_file(files, str(array.path / label), 0, array.dtype, box, 0, box.numel)
            yield Fingerprint(*parameter_and_state(array.name), math.prod(array.shape), found % MODULUS)


def _of_file(files: RangedFiles, path: str, offset: int, dtype: str, box: Box, first: int, count: int) -> int:
    """Of `count` elements that lie in a file from a byte on, of a box from its element `first` on."""
    size, found, memory = item_size(dtype), 0, memoryview(bytearray(min(BLOCK, count * item_size(dtype))))
    for begin in range(0, count, BLOCK // size):
        window = memory[: min(BLOCK, (count - begin) * size)]
        try:
            files.read(path, offset + begin * size, window)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or os.strerror(error.errno or 0)}") from None
        found += of_box(bits_of(window, dtype), first + begin, box)
    return found


def _check_numel(path: Path, name: str, numel: int, shape: tuple[int, ...]) -> None:
    if numel != math.prod(shape):
        raise UserError(f"{path}: expected {math.prod(shape):,} elements of {name}, found {numel:,}")
