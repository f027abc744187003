"""Where the elements of tensor-parallel slices lie in the full parameter. Pure arithmetic; all sizes in elements."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_patches.errors import UserError
from ckpt_patches.formats.zero import Shape
from ckpt_patches.formats.zero_experts import Experts

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
    copies: tuple[Block, ...] = ()  # their targets are already filled by others, to which they must be equal


def whole(shape: Shape, index: int = 0) -> Layout:
    """The layout of one slice that is the full parameter."""
    numel = math.prod(shape)
    return Layout(shape, (Block(index, 0, numel, 0, numel, numel, 1),) if numel else ())


def flattened(shape: Shape) -> Layout:
    """The layout of one slice that is the full parameter, without its dimensions."""
    return whole((math.prod(shape),))


def replicated(name: str, shapes: Sequence[Shape]) -> Layout:
    """The layout of slices that are each the full parameter."""
    if len(set(shapes)) > 1:
        raise UserError(f"{name}: expected slices of one shape, found {_text(shapes)}")
    copies = [block for index in range(1, len(shapes)) for block in whole(shapes[0], index).blocks]
    return Layout(shapes[0], whole(shapes[0]).blocks, tuple(copies))


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
        len(shares) != len(shapes) or sum(shares) != size for shares, size in zip(widths, sizes, strict=True)
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


# Affine maps: for each tensor-parallel rank, views of its slice and of the parameter, as arguments of torch.as_strided


def affine(name: str, entry: Mapping[str, Any], shapes: Sequence[Shape]) -> Layout:
    """The layout of a recorded affine map. A piece that several ranks hold is placed once; the others are compared."""
    shape = tuple(entry["logical_shape"])
    blocks: list[Block] = []
    copies: list[Block] = []
    written: set[int] = set()
    for rank, held in entry["ranks"].items():
        tp = int(rank)
        if tp >= len(shapes) or math.prod(held["shard_shape"]) != math.prod(shapes[tp]):
            raise UserError(f"{name}: its affine map is of a slice {held['shard_shape']} on tensor-parallel rank {tp}")
        for piece in held["pieces"]:
            if piece.get("scale", 1.0) != 1.0:
                raise UserError(f"{name}: its affine map has a scale, which changes the optimizer's state")
            is_copy = len(piece["locations"]) > 1 and piece["source"][0] in written
            (copies if is_copy else blocks).extend(_blocks_of(tp, piece))
            written.add(piece["source"][0])
    return Layout(shape, tuple(blocks), tuple(copies))


def _blocks_of(tp: int, piece: Mapping[str, Any]) -> Iterator[Block]:
    """The blocks of a piece: rows as long as possible, and one block per index of the remaining dimensions.

    Upstream calls the full parameter the source and the slice the destination.
    """
    (first_target, target_strides), (first_source, source_strides) = piece["source"], piece["dest"]
    dims = [dim for dim in zip(piece["shape"], target_strides, source_strides, strict=True) if dim[0] != 1]
    length = 1
    while dims and dims[-1][1] == dims[-1][2] == length:
        length *= dims.pop()[0]
    count, target_stride, source_stride = dims.pop() if dims else (1, length, length)
    for index in itertools.product(*(range(size) for size, *_ in dims)):
        target = first_target + sum(i * dim[1] for i, dim in zip(index, dims, strict=True))
        source = first_source + sum(i * dim[2] for i, dim in zip(index, dims, strict=True))
        if length and count:
            yield Block(tp, source, source_stride, target, target_stride, length, count)


# Experts


def stacked(name: str, experts: Experts, shapes: Sequence[Shape]) -> Layout:
    """The layout of each rank's experts in the full parameter; `shapes` are by expert-parallel rank.

    Raises:
        UserError: the shapes do not fit the numbers of experts, or the recorded affine map differs.
    """
    for ep, (shape, held) in enumerate(zip(shapes, experts.held, strict=True)):
        if not shape or shape[0] != len(held) or shape[1:] != shapes[0][1:]:
            raise UserError(
                f"{name}: expected {len(held)} experts on expert-parallel rank {ep}, found the shape {shape}"
            )
    each = whole(shapes[0][1:]).blocks
    numel = each[0].length if each else 0
    found = Layout((experts.count, *shapes[0][1:]), *_blocks(experts.held, numel))
    if experts.recorded is not None and numel:
        recorded = affine(name, experts.recorded, shapes)
        if recorded.shape != found.shape or _places(recorded, numel) != _places(found, numel):
            raise UserError(f"{name}: the affine map that is recorded of it is not that of its experts' placement")
    return found


def _blocks(held: Sequence[Sequence[int]], numel: int) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """One block per expert, and blocks of further copies of experts."""
    blocks: dict[int, Block] = {}
    copies = []
    for ep, experts in enumerate(held):
        for index, expert in enumerate(experts):
            block = Block(ep, index * numel, numel, expert * numel, numel, numel, 1)
            if blocks.setdefault(expert, block) is not block:
                copies.append(block)
    return (tuple(blocks.values()), tuple(copies)) if numel else ((), ())


def _places(placed: Layout, numel: int) -> set[tuple[int, float, float]]:
    """The slice, index in the slice, and number of each expert."""

    def experts(block: Block) -> Iterator[tuple[int, float, float]]:
        for row in range(block.count):
            source, target = block.source + row * block.source_stride, block.target + row * block.target_stride
            for at in range(0, block.length, numel):
                yield block.slice, (source + at) / numel, (target + at) / numel

    return {place for block in (*placed.blocks, *placed.copies) for place in experts(block)}


# Checks


def check(name: str, layout: Layout, shapes: Sequence[Shape]) -> None:
    """Check that a layout stays within these slices and fills the parameter once; its numbers can be a checkpoint's.

    Raises:
        UserError: it does not.
    """
    numel = math.prod(layout.shape)
    for block in (*layout.blocks, *layout.copies):
        places = (block.source, block.source_stride, block.target, block.target_stride, block.length, block.count)
        whole = all(type(place) is int and place >= 0 for place in places) and block.target_stride >= block.length
        steps = block.count - 1
        if not whole or (
            block.source + steps * block.source_stride + block.length > math.prod(shapes[block.slice])
            or block.target + steps * block.target_stride + block.length > numel
        ):
            raise UserError(f"{name}: slices of the shapes {_text(shapes)} do not make the shape {layout.shape}")
    filled = sum(block.length * block.count for block in layout.blocks)
    if filled != numel or not _are_disjoint(name, layout.blocks):
        raise UserError(f"{name}: the slices have not all elements of the shape {layout.shape}, or some twice")


# Maximum of rows to check one by one. Not counted: rows of blocks that together fill every row of the parameter.
MOST_ROWS = 5_000_000


def _are_disjoint(name: str, blocks: Sequence[Block]) -> bool:
    """Whether no element of the parameter is placed twice."""
    by_rows: dict[tuple[int, int], list[Block]] = {}
    for block in blocks:
        by_rows.setdefault((block.target_stride, block.count), []).append(block)
    ranges: list[tuple[int, int]] = []
    apart: list[Block] = []
    for (stride, count), group in by_rows.items():
        begin = min(block.target for block in group)
        if count > 1 and _fill(group, begin, stride):
            ranges.append((begin, begin + stride * count))
        else:
            apart += group
    if sum(block.count for block in apart) > MOST_ROWS:
        raise UserError(f"{name}: its affine map has more than {MOST_ROWS} pieces, too many to check")
    ranges += [
        (block.target + row * block.target_stride, block.target + row * block.target_stride + block.length)
        for block in apart
        for row in range(block.count)
    ]
    return all(one[1] <= other[0] for one, other in itertools.pairwise(sorted(ranges)))


def _fill(blocks: Sequence[Block], begin: int, stride: int) -> bool:
    """Whether the first rows of blocks are consecutive and fill a row of the parameter; then all rows do."""
    for block in sorted(blocks, key=lambda block: block.target):
        if block.target != begin:
            return False
        begin += block.length
    return begin == min(block.target for block in blocks) + stride


def _text(shapes: Sequence[Shape]) -> str:
    return ", ".join(map(str, sorted(set(shapes))))
