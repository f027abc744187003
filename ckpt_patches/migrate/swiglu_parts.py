"""Restore the row order of a tensor in which torch FSDP2 mixed the rows of W and V. Pure."""

import itertools
import math

from ckpt_patches.formats.swiglu_rows import Grid, rows_axis
from ckpt_patches.formats.torch_dist import Offsets
from ckpt_patches.migrate import chunk_cover
from ckpt_patches.migrate.chunk_cover import CoverError, Part
from ckpt_patches.migrate.old_checkpoint import Array, Chunk


def parts(array: Array, grid: Grid) -> list[Part]:
    """The W and the V of each tensor-parallel rank, as a run without FSDP2 saves them.

    Raises:
        CoverError: elements are missing or duplicated, or the ranks' shards are uneven.
    """
    chunk_cover.parts(array)
    axis, shapes = rows_axis(array.name, len(array.shape)), {chunk.shape for chunk in array.chunks.values()}
    if len(shapes) > 1 or any(math.prod(shape[:axis]) != 1 for shape in shapes):
        raise CoverError(f"{array.name}: expected chunks of one shape, each of one layer, found {sorted(shapes)}")
    in_order: dict[tuple[Offsets, Offsets], list[Chunk]] = {}  # by layer, chunks in order of their first row
    for at, chunk in sorted(array.chunks.items(), key=lambda own: own[0][axis]):
        in_order.setdefault((at[:axis], at[axis + 1 :]), []).append(chunk)
    found = []
    for (before, behind), chunks in in_order.items():
        for number, (half, rank) in enumerate(itertools.product(range(2), range(grid.tensor_parallel))):
            own = [chunks[grid.filed(half, rank, piece)] for piece in range(grid.data_parallel)]
            rows = sum(chunk.shape[axis] for chunk in own)
            shape = (*own[0].shape[:axis], rows, *own[0].shape[axis + 1 :])
            extents = tuple(chunk.extent for chunk in own if chunk.extent is not None)
            found.append(Part((*before, number * rows, *behind), shape, extents))
    return found
