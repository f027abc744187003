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

    def scaled(self, size: int) -> "Block":
        """The block in bytes, for elements of `size` bytes."""
        return Block(
            self.slice,
            self.source * size,
            self.source_stride * size,
            self.target * size,
            self.target_stride * size,
            self.length * size,
            self.count,
        )


@dataclass(frozen=True)
class Layout:
    """The layout of a full parameter."""

    shape: Shape
    blocks: tuple[Block, ...]


def whole(shape: Shape) -> Layout:
    """The layout of one slice that is the full parameter."""
    numel = math.prod(shape)
    return Layout(shape, (Block(0, 0, numel, 0, numel, numel, 1),) if numel else ())


def replicated(name: str, shapes: Sequence[Shape]) -> Layout:
    """The layout of slices that are each the full parameter."""
    if len(set(shapes)) > 1:
        raise UserError(f"{name}: expected slices of one shape, found {_text(shapes)}")
    return whole(shapes[0])


def concatenated(name: str, shapes: Sequence[Shape], dim: int) -> Layout:
    """The layout of slices that are concatenated along a dimension."""
    first = shapes[0]
    if len(shapes) == 1:
        return whole(first)
    if dim >= len(first) or any(s[:dim] + s[dim + 1 :] != first[:dim] + first[dim + 1 :] for s in shapes):
        raise UserError(f"{name}: slices of the shapes {_text(shapes)} cannot be put together along dimension {dim}")
    return interleaved(first, dim, [[shape[dim] for shape in shapes]])


def in_two_halves(name: str, shapes: Sequence[Shape]) -> Layout:
    """The layout of slices with two sub-parameters: the first half of the rows and the second."""
    if any(not shape or shape[0] < 2 or shape[1:] != shapes[0][1:] for shape in shapes):
        raise UserError(f"{name}: slices of the shapes {_text(shapes)} have no two sub-parameters along dimension 0")
    first = [-(-shape[0] // 2) for shape in shapes]
    return interleaved(shapes[0], 0, [first, [shape[0] - half for shape, half in zip(shapes, first, strict=True)]])


def interleaved(shape: Shape, dim: int, widths: Widths) -> Layout:
    """The layout of slices with a share of each sub-parameter; the full parameter has each of these in one piece.

    `shape` is a slice's or the full parameter's; its dimension `dim` is ignored.
    """
    outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    slices = range(len(widths[0]))
    held = [sum(shares[i] for shares in widths) for i in slices]
    total = sum(held)
    blocks, target, source = [], 0, [0] * len(held)
    for shares in widths:
        for i in slices:
            sizes = (source[i] * inner, held[i] * inner, target * inner, total * inner, shares[i] * inner, outer)
            blocks.append(_joined(Block(i, *sizes)))
            source[i] += shares[i]
            target += shares[i]
    return Layout((*shape[:dim], total, *shape[dim + 1 :]), tuple(block for block in blocks if block.length))


def _joined(block: Block) -> Block:
    """Join rows without gaps into one row."""
    if block.source_stride == block.target_stride == block.length or block.count == 1:
        length = block.length * block.count
        return Block(block.slice, block.source, length, block.target, length, length, 1)
    return block


# Sub-parameters as a checkpoint describes them


@dataclass(frozen=True)
class SubParams:
    """Sub-parameters: stored as one parameter, but each sliced on its own."""

    pattern: str
    patterns: Any
    shape: Sequence[Any]  # at `partition_dim` the widths of the sub-parameters, or their number
    partition_dim: int
    widths: tuple[tuple[int, ...], ...] | None = None  # by sub-parameter and tensor-parallel rank, if recorded


def sub_params(name: str, sub: SubParams, shapes: Sequence[Shape]) -> tuple[Layout, Sequence[Any]]:
    """The layout of slices with shares of sub-parameters, and the description with the widths in it."""
    sizes, described = _sizes(name, sub, shapes), sub.shape
    if not isinstance(sub.shape[sub.partition_dim], tuple) and sub.widths is None:
        described = (*sub.shape[: sub.partition_dim], sizes, *sub.shape[sub.partition_dim + 1 :])
    widths = sub.widths if sub.widths is not None else _even(name, sizes, len(shapes))
    if len(widths) != len(sizes) or any(
        len(shares) != len(shapes) or sum(shares) != size or any(type(n) is not int or n < 0 for n in shares)
        for shares, size in zip(widths, sizes, strict=True)
    ):
        raise UserError(f"{name}: expected the shares of sub-parameters of {list(sizes)} elements, found {widths}")
    logical = [sum(d) if isinstance(d, tuple) else d for d in sub.shape]
    logical[sub.partition_dim] = sum(sizes)
    shape = _resolved(name, logical, sum(math.prod(s) for s in shapes))
    layout = interleaved(shape, sub.partition_dim, widths)
    _check_slices(name, layout.shape, sub.partition_dim, widths, shapes)
    return layout, described


def _sizes(name: str, sub: SubParams, shapes: Sequence[Shape]) -> tuple[int, ...]:
    """The widths of sub-parameters. Without recorded widths, a number is a count of sub-parameters of equal width."""
    said = sub.shape[sub.partition_dim]
    if isinstance(said, tuple) or sub.widths is not None:
        return tuple(said)
    width = sum(shape[sub.partition_dim] for shape in shapes)
    if said <= 0 or width % said:
        raise UserError(f"{name}: {width} elements along dimension {sub.partition_dim} are no {said} sub-parameters")
    return (width // said,) * int(said)


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


def _check_slices(name: str, shape: Shape, dim: int, widths: Widths, shapes: Sequence[Shape]) -> None:
    for i, found in enumerate(shapes):
        expected = [*shape[:dim], sum(shares[i] for shares in widths), *shape[dim + 1 :]]
        if math.prod(expected) != math.prod(found):
            raise UserError(
                f"{name}: tensor-parallel rank {i} holds {math.prod(found)} elements, by its shares of the "
                f"sub-parameters it would be {math.prod(expected)}"
            )


def _text(shapes: Sequence[Shape]) -> str:
    return ", ".join(map(str, sorted(set(shapes))))
