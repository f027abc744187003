"""Divide an old array into the chunks of the new tensor: each shard is one chunk. Pure."""

import itertools
import math
import operator
from dataclasses import replace
from typing import NamedTuple

from ckpt_patches.errors import UserError
from ckpt_patches.formats import swiglu_rows
from ckpt_patches.formats.checkpoint import Extent
from ckpt_patches.formats.dcp import TOO_MANY, untiled
from ckpt_patches.formats.dtypes import nbytes
from ckpt_patches.formats.swiglu_rows import Grid
from ckpt_patches.formats.torch_dist import Offsets, Tensor
from ckpt_patches.formats.torch_dist_reader import Chunked

Shape = tuple[int, ...]


class Part(NamedTuple):
    """A chunk of a new tensor, and the byte ranges of its elements, in order."""

    offsets: Offsets
    shape: Shape
    extents: tuple[Extent, ...]


def check(array: Chunked, reasons: dict[tuple[str, str], str]) -> None:
    """Check that the chunks of an array hold each element exactly once.

    `reasons`: why chunks cannot be read, with the file's name, by array and chunk.

    Raises:
        UserError: they do not.
    """
    tensor = array.tensor
    for at in tensor.chunks:
        if at not in array.extents:
            reason = reasons.get((tensor.name, str(at)))
            problem = f"cannot be read: {reason}" if reason else "is not there, or not all of it"
            raise UserError(f"{tensor.name}: its chunk at {list(at)} {problem}")
    if why := untiled(tensor):
        raise UserError(f"{tensor.name}: {'too many chunks to compare them' if why == TOO_MANY else why}")


def of_array(array: Chunked) -> list[Part]:
    """The shards of an array; those of a flattened one are joined from the slices of data-parallel ranks.

    Raises:
        UserError: the shards of a flattened array are uneven.
    """
    return [_part(array, offsets) for offsets in array.shards().values()]


def _part(array: Chunked, offsets: list[Offsets]) -> Part:
    tensor, shape = array.tensor, array.shape(offsets)
    extents = tuple(array.extents[at] for at in offsets)
    if tensor.whole is None:
        return Part(offsets[0], shape, extents)
    if tuple(map(operator.mul, shape, tensor.size)) != tensor.whole:
        raise UserError(
            f"{tensor.name}: expected {list(tensor.size[:-1])} even parts of {list(tensor.whole)}, found parts of "
            f"{tensor.size[-1]} elements"
        )
    return Part(tuple(map(operator.mul, offsets[0], shape)), shape, extents)


def joined(array: Chunked) -> Part:
    """A 1-D array as one chunk."""
    return Part((0,), array.tensor.size, tuple(array.extents[at] for at in sorted(array.extents)))


def with_full_shape(array: Chunked, weight: Tensor) -> Chunked:
    """A flattened array with its parameter's shape, if the index does not store the original one, as up to 0.8."""
    tensor, size = array.tensor, weight.size
    is_flattened = len(tensor.size) == len(size) + 1 and math.prod(tensor.size) == math.prod(size)
    return replace(array, tensor=replace(tensor, whole=size)) if is_flattened and tensor.whole is None else array


def without_padding(bucket: Chunked, numel: int) -> Part:
    """A bucket without the padding at its end, which depends on the number of data-parallel ranks.

    Raises:
        UserError: it has fewer elements.
    """
    tensor, left, kept = bucket.tensor, nbytes(bucket.tensor.dtype, numel), []
    if len(tensor.size) != 1 or not 0 <= numel <= tensor.size[0]:
        raise UserError(f"{tensor.name}: expected {numel} elements without its padding, found {list(tensor.size)}")
    for extent in joined(bucket).extents:
        kept.append(extent._replace(nbytes=min(left, extent.nbytes)))
        left -= kept[-1].nbytes
    return Part((0,), (numel,), tuple(extent for extent in kept if extent.nbytes))


def with_rows_in_place(array: Chunked, grid: Grid) -> list[Part]:
    """The W and the V of each tensor-parallel rank, as a run without FSDP2 saves them.

    Raises:
        UserError: the ranks' shards are uneven.
    """
    tensor = array.tensor
    axis, shapes = swiglu_rows.rows_axis(tensor.name, len(tensor.size)), set(tensor.chunks.values())
    if len(shapes) > 1 or any(math.prod(shape[:axis]) != 1 for shape in shapes):
        raise UserError(f"{tensor.name}: expected chunks of one shape, each of one layer, found {sorted(shapes)}")
    (shape,) = shapes
    height = grid.data_parallel * shape[axis]
    in_order: dict[tuple[Offsets, Offsets], list[Extent]] = {}  # by layer, chunks in order of their first row
    for at in sorted(tensor.chunks, key=operator.itemgetter(axis)):
        in_order.setdefault((at[:axis], at[axis + 1 :]), []).append(array.extents[at])
    found = []
    for (layer, other), extents in in_order.items():
        for number, (half, rank) in enumerate(itertools.product(range(2), range(grid.tensor_parallel))):
            own = tuple(extents[grid.filed(half, rank, piece)] for piece in range(grid.data_parallel))
            begin = (*layer, number * height, *other)
            found.append(Part(begin, (*shape[:axis], height, *shape[axis + 1 :]), own))
    return found
