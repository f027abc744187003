"""Check that the chunks of an array hold each element exactly once, and join them to the ranks' shards. Pure."""

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ckpt_patches.errors import UserError
from ckpt_patches.formats.checkpoint import Extent
from ckpt_patches.formats.dtypes import nbytes
from ckpt_patches.formats.torch_dist import Offsets
from ckpt_patches.migrate.old_checkpoint import Array, Chunk, Shape

MOST_CELLS = 64  # per chunk; the grids that Megatron writes have fewer


class CoverError(UserError):
    """The chunks of an array do not hold each of its elements exactly once."""


@dataclass(frozen=True)
class Part:
    """A box within a tensor, and the byte ranges of its elements, in order."""

    offsets: Offsets
    shape: Shape
    extents: tuple[Extent, ...]


def parts(array: Array, *, join: bool = False) -> list[Part]:
    """The parts of an array. With `join`, a 1-D array is a single part.

    Raises:
        CoverError: elements are missing or duplicated, or the ranks' shards are uneven.
    """
    for at, chunk in array.chunks.items():
        if chunk.extent is None:
            problem = f"cannot be read: {chunk.reason}" if chunk.reason else "is not there, or not all of it"
            raise CoverError(f"{array.name}: its chunk at {list(at)} {problem}")
        if chunk.extent.nbytes != nbytes(array.dtype, math.prod(chunk.shape)):
            raise CoverError(f"{array.name}: its chunk at {list(at)} has {chunk.extent.nbytes} bytes")
    if array.whole is not None:
        return list(_shards(array, array.whole))
    check(array.name, array.shape, {at: chunk.shape for at, chunk in array.chunks.items()})
    if join and len(array.shape) == 1:
        return [Part((0,), array.shape, _extents(chunk for _, chunk in sorted(array.chunks.items())))]
    return [Part(at, chunk.shape, _extents([chunk])) for at, chunk in array.chunks.items()]


def with_full_shape(array: Array, model: Array | None) -> Array:
    """A flattened array with its parameter's shape, if the index does not store the original one, as up to 0.8."""
    if array.whole is not None or model is None or len(array.shape) != len(model.shape) + 1:
        return array
    is_same = math.prod(array.shape) == math.prod(model.shape)
    return replace(array, whole=model.shape) if is_same else array


def _extents(chunks: Iterable[Chunk]) -> tuple[Extent, ...]:
    return tuple(chunk.extent for chunk in chunks if chunk.extent is not None)


def _shards(array: Array, whole: Shape) -> Iterator[Part]:
    """Each tensor-parallel rank's shard of a flattened array, joined from the parts of its data-parallel ranks."""
    fragments, numel = array.shape[:-1], array.shape[-1]
    shape = tuple(n // parts if parts else 0 for n, parts in zip(whole, fragments, strict=False))
    if len(fragments) != len(whole) or math.prod(shape) != numel or math.prod(whole) != math.prod(array.shape):
        raise CoverError(
            f"{array.name}: expected {list(fragments)} even parts of {list(whole)}, found parts of {numel} elements"
        )
    by_rank: dict[Offsets, list[tuple[int, Chunk]]] = {}
    for at, chunk in array.chunks.items():
        if any(n != 1 for n in chunk.shape[:-1]) or any(i >= n for i, n in zip(at, fragments, strict=False)):
            raise CoverError(f"{array.name}: expected a chunk of one rank's shard at {list(at)}, found {chunk.shape}")
        by_rank.setdefault(at[:-1], []).append((at[-1], chunk))
    for index in itertools.product(*map(range, fragments)):
        own = sorted(by_rank.get(index, []), key=lambda found: (found[0], found[1].shape[-1]))
        _check_line(f"{array.name}, shard {list(index)}", numel, [(at, chunk.shape[-1]) for at, chunk in own])
        offsets = tuple(i * n for i, n in zip(index, shape, strict=True))
        yield Part(offsets, shape, _extents(chunk for _, chunk in own))


def _check_line(name: str, numel: int, found: list[tuple[int, int]]) -> None:
    """Check that sorted ranges (first element, length) are consecutive and end at `numel`."""
    end = 0
    for at, length in found:
        if at != end:
            what = f"{at - end} elements from {end} on are in no chunk" if at > end else f"element {at} is there twice"
            raise CoverError(f"{name}: {what}")
        end += length
    if end != numel:
        what = f"{numel - end} elements from {end} on are in no chunk" if end < numel else f"{end} elements"
        raise CoverError(f"{name}: {what}, expected {numel}")


def check(name: str, shape: Shape, chunks: dict[Offsets, Shape]) -> None:
    """Check that boxes with these offsets and shapes fill an array without overlap.

    Raises:
        CoverError: they do not.
    """
    if len(shape) == 1:
        _check_line(name, shape[0], sorted((at[0], own[0]) for at, own in chunks.items()))
        return
    for at, own in chunks.items():
        if any(first + n > size for first, n, size in zip(at, own, shape, strict=True)):
            raise CoverError(f"{name}: its chunk of {list(own)} at {list(at)} is not within {list(shape)}")
    edges = [
        sorted({0, size, *(at[axis] for at in chunks), *(at[axis] + own[axis] for at, own in chunks.items())})
        for axis, size in enumerate(shape)
    ]
    cells = math.prod(len(own) - 1 for own in edges)
    if cells > MOST_CELLS * max(1, len(chunks)):
        raise CoverError(f"{name}: expected a grid of chunks, found {len(chunks)} that make one of {cells}")
    seen: set[tuple[int, ...]] = set()
    for at, own in chunks.items():
        for cell in itertools.product(*map(_between, edges, at, own)):
            if cell in seen:
                first = [axis[index] for axis, index in zip(edges, cell, strict=True)]
                raise CoverError(f"{name}: element {first} is there twice")
            seen.add(cell)
    if len(seen) != cells:
        missing = next(cell for cell in itertools.product(*(range(len(own) - 1) for own in edges)) if cell not in seen)
        first = [axis[index] for axis, index in zip(edges, missing, strict=True)]
        raise CoverError(f"{name}: element {first} is in no chunk")


def _between(edges: list[int], first: int, length: int) -> range:
    return range(bisect.bisect_left(edges, first), bisect.bisect_left(edges, first + length))
