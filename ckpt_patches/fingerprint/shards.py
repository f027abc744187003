"""The elements of the full tensor that a rank holds, computed from torch's placements. Pure functions.

https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

Indices = list[int]  # along one dimension of the full tensor, in the order of the shard


def indices(
    shape: Sequence[int], placements: Sequence[Any], mesh: Sequence[int], coordinate: Sequence[int]
) -> list[Indices]:
    """The indices of the shard at a coordinate of the mesh, by dimension.

    Args:
        shape: of the full tensor.
        placements: one per mesh dimension: a `Shard` divides as torch.chunk does, a strided one (FSDP with tensor
            parallelism) divides each of `split_factor` chunks; any other does not divide.
        mesh: its shape.
        coordinate: the rank's coordinate in the mesh.
    """
    found = [list(range(size)) for size in shape]
    for placement, count, at in zip(placements, mesh, coordinate, strict=True):
        dimension = getattr(placement, "dim", None)
        if dimension is not None:
            chunks = _chunks(found[dimension], getattr(placement, "split_factor", 1))
            found[dimension] = [index for chunk in chunks for index in _chunk(chunk, count, at)]
    return found


def _chunks(values: Indices, count: int) -> list[Indices]:
    return [_chunk(values, count, at) for at in range(count)]


def _chunk(values: Indices, count: int, at: int) -> Indices:
    """One of `count` chunks, as in torch.chunk: all are equally long except at the end."""
    size = -(-len(values) // count)
    return values[at * size : (at + 1) * size]


def runs(found: Sequence[Indices]) -> Iterator[tuple[tuple[slice, ...], tuple[int, ...]]]:
    """The boxes of a shard: the slices of each box in the shard, and its first element in the full tensor."""
    for pieces in itertools.product(*(list(_in_a_row(own)) for own in found)):
        yield tuple(own for own, _ in pieces), tuple(first for _, first in pieces)


def _in_a_row(own: Indices) -> Iterator[tuple[slice, int]]:
    begin = 0
    for end in range(1, len(own) + 1):
        if end == len(own) or own[end] != own[end - 1] + 1:
            yield slice(begin, end), own[begin]
            begin = end
