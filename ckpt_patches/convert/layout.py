"""Where the elements of tensor-parallel slices lie in the full parameter. Pure arithmetic; all sizes in elements."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_patches.errors import UserError
from ckpt_patches.formats.zero import Shape

Widths = Sequence[Sequence[int]]  # by sub-parameter and slice


@dataclass(frozen=True)
class Block:
    """Rows of a slice and their targets: row i goes from source + i * source_stride to target + i * target_stride."""

    slice: int  # index of the slice
    source: int
    source_stride: int
    target: int
    target_stride: int
    length: int  # of a row
    count: int  # of rows


@dataclass(frozen=True)
class Layout:
    """The layout of a full parameter."""

    shape: Shape
    blocks: tuple[Block, ...]


def whole(shape: Shape) -> Layout:
    """The layout of one slice that is the full parameter."""
    numel = math.prod(shape)
    return Layout(shape, (Block(0, 0, numel, 0, numel, numel, 1),) if numel else ())


def concatenated(name: str, shapes: Sequence[Shape], dim: int) -> Layout:
    """The layout of slices that are concatenated along a dimension."""
    if len(shapes) == 1:
        return whole(shapes[0])
    _check_alike(name, shapes, dim)
    return interleaved(shapes[0], dim, [[shape[dim] for shape in shapes]])


def in_two_halves(name: str, shapes: Sequence[Shape]) -> Layout:
    """The layout of slices with two sub-parameters: the first half of the rows and the second."""
    _check_alike(name, shapes, 0)
    rows = [shape[0] for shape in shapes]
    if min(rows) < 2:
        raise UserError(f"{name}: slices of the shapes {_text(shapes)} have no two sub-parameters along dimension 0")
    return interleaved(shapes[0], 0, [[-(-count // 2) for count in rows], [count // 2 for count in rows]])


def _check_alike(name: str, shapes: Sequence[Shape], dim: int) -> None:
    """Check that shapes are equal but for one dimension."""
    if any(dim >= len(shape) for shape in shapes) or len({(*own[:dim], *own[dim + 1 :]) for own in shapes}) > 1:
        raise UserError(f"{name}: slices of the shapes {_text(shapes)} cannot be put together along dimension {dim}")


def interleaved(shape: Shape, dim: int, widths: Widths) -> Layout:
    """The layout of slices with a share of each sub-parameter; the full parameter has each of these in one piece.

    `shape` is a slice's or the full parameter's; its dimension `dim` is ignored.
    """
    outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    held = [sum(of_slice) for of_slice in zip(*widths, strict=True)]
    total = sum(held)
    blocks, target, source = [], 0, [0] * len(held)
    for shares in widths:
        for i, share in enumerate(shares):
            length, strides = share * inner, (held[i] * inner, total * inner)
            if length and outer and set(strides) == {length}:  # rows without gaps are one row
                row = outer * length
                blocks.append(Block(i, source[i] * inner, row, target * inner, row, row, 1))
            elif length:
                blocks.append(Block(i, source[i] * inner, strides[0], target * inner, strides[1], length, outer))
            source[i] += share
            target += share
    return Layout((*shape[:dim], total, *shape[dim + 1 :]), tuple(blocks))


# Sub-parameters as a checkpoint describes them


@dataclass(frozen=True)
class SubParams:
    """Sub-parameters: stored as one parameter, but each sliced on its own."""

    patterns: Any
    shape: Sequence[Any]  # at `partition_dim` the widths of the sub-parameters, or their number
    partition_dim: int
    widths: tuple[tuple[int, ...], ...] | None = None  # by sub-parameter and tensor-parallel rank, if recorded


def sub_params(name: str, sub: SubParams, shapes: Sequence[Shape]) -> tuple[Layout, Sequence[Any]]:
    """The layout of slices with shares of sub-parameters, and the description with the widths in it."""
    dim, stated, described = sub.partition_dim, sub.shape[sub.partition_dim], sub.shape
    if isinstance(stated, tuple) or sub.widths is not None:
        sizes = tuple(stated)
    else:  # the number of sub-parameters of equal width
        width = sum(shape[dim] for shape in shapes)
        if stated <= 0 or width % stated:
            raise UserError(f"{name}: {width} elements along dimension {dim} are no {stated} sub-parameters")
        sizes = (width // stated,) * int(stated)
        described = (*sub.shape[:dim], sizes, *sub.shape[dim + 1 :])
    widths = sub.widths if sub.widths is not None else _even(name, sizes, len(shapes))
    if len(widths) != len(sizes) or any(
        len(shares) != len(shapes) or sum(shares) != size or any(type(n) is not int or n < 0 for n in shares)
        for shares, size in zip(widths, sizes, strict=True)
    ):
        raise UserError(f"{name}: expected the shares of sub-parameters of {list(sizes)} elements, found {widths}")
    logical = [sum(d) if isinstance(d, tuple) else d for d in sub.shape]
    logical[dim] = sum(sizes)
    layout = interleaved(_resolved(name, logical, sum(map(math.prod, shapes))), dim, widths)
    of_one = math.prod(size for axis, size in enumerate(layout.shape) if axis != dim)
    for i, found in enumerate(map(math.prod, shapes)):
        expected = of_one * sum(shares[i] for shares in widths)
        if found != expected:
            raise UserError(
                f"{name}: tensor-parallel rank {i} holds {found} elements, by its shares of the sub-parameters it "
                f"would be {expected}"
            )
    return layout, described


def _even(name: str, sizes: Sequence[int], slices: int) -> list[list[int]]:
    if any(size < 0 or size % slices for size in sizes):
        raise UserError(
            f"{name}: sub-parameters of {list(sizes)} elements cannot have been cut evenly for {slices} "
            "tensor-parallel ranks, and the checkpoint does not record how they were"
        )
    return [[size // slices] * slices for size in sizes]


def _resolved(name: str, shape: Sequence[int], numel: int) -> Shape:
    """A shape in which a dimension of -1 is computed from the number of elements."""
    known = math.prod(size for size in shape if size >= 0)
    unknown = [i for i, size in enumerate(shape) if size < 0]
    if len(unknown) > 1 or (unknown and (known == 0 or numel % known)) or (not unknown and known != numel):
        raise UserError(f"{name}: {numel} elements have not the shape {list(shape)} that the sub-parameters say")
    return tuple(size if size >= 0 else numel // known for size in shape)


def _text(shapes: Sequence[Shape]) -> str:
    return ", ".join(map(str, sorted(set(shapes))))
