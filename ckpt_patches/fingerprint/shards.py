"""Which elements of a whole tensor a rank's part is, by torch's placements. Pure.

https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

Indices = list[int]  # of one dimension of the whole tensor, in the order in which the part has them


def indices(
    shape: Sequence[int], placements: Sequence[Any], mesh: Sequence[int], coordinate: Sequence[int]
) -> list[Indices]:
    """By dimension the indices of the part at a coordinate of the mesh.

    Args:
        shape: of the whole tensor.
        placements: of each dimension of the mesh: a `Shard` divides as torch.chunk does, a strided one (FSDP beside
            tensor parallelism) divides each of `split_factor` chunks; any other does not divide.
        mesh: its shape.
        coordinate: of the rank in it.
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
    """One of so many, as torch.chunk makes them: all but the last ones are as long as each other."""
    size = -(-len(values) // count)
    return values[at * size : (at + 1) * size]


def runs(found: Sequence[Indices]) -> Iterator[tuple[tuple[slice, ...], tuple[int, ...]]]:
    """The boxes that a part consists of: where each lies in the part, and its first element in the whole tensor."""
    for pieces in itertools.product(*(list(_in_a_row(own)) for own in found)):
        yield tuple(own for own, _ in pieces), tuple(first for _, first in pieces)


def _in_a_row(own: Indices) -> Iterator[tuple[slice, int]]:
    begin = 0
    for end in range(1, len(own) + 1):
        if end == len(own) or own[end] != own[end - 1] + 1:
            yield slice(begin, end), own[begin]
            begin = end
