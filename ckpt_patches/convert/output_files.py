"""The parts of a plan: the files to write, and the ranges of the checkpoint's files that go into each."""

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from ckpt_patches.convert import layout
from ckpt_patches.convert.layout import Layout
from ckpt_patches.errors import UserError
from ckpt_patches.formats.dtypes import ITEM_SIZE
from ckpt_patches.formats.torch_file import StorageHeader, TensorHeader, storages_in
from ckpt_patches.formats.zero import ElementType, ModelFile, Shape
from ckpt_patches.formats.zero_checkpoint import File


class Run(NamedTuple):
    """A contiguous byte range in a file of the checkpoint. The plan of a large model has millions of them."""

    file: int  # index of the file
    offset: int  # from the start of the file
    nbytes: int


class Slice(Protocol):
    """One tensor-parallel rank's flattened share of a parameter's state, located in the ranks' files."""

    def runs(self, begin: int, end: int) -> Iterator[Run]:
        """The runs with the bytes from `begin` to `end` of the slice."""


@dataclass(frozen=True)
class Pieces:
    """A slice of a few runs of different lengths."""

    pieces: tuple[Run, ...]
    ends: tuple[int, ...]  # by piece, in bytes of the slice

    @classmethod
    def of(cls, pieces: Sequence[Run]) -> "Pieces":
        return cls(tuple(pieces), tuple(itertools.accumulate(piece.nbytes for piece in pieces)))

    def runs(self, begin: int, end: int) -> Iterator[Run]:
        index = bisect.bisect_right(self.ends, begin)
        while begin < end:
            file, offset, nbytes = self.pieces[index]
            skipped = begin - (self.ends[index] - nbytes)
            length = min(nbytes - skipped, end - begin)
            if length:
                yield Run(file, offset + skipped, length)
            begin += length
            index += 1


@dataclass(frozen=True)
class EqualPieces:
    """A slice in equal parts, one per rank, at the same offset in its group: small, even for hundreds of ranks."""

    bases: tuple[tuple[int, int], ...]  # by rank: file, offset of the group's flattened tensor; shared by many slices
    start: int  # bytes from that offset
    nbytes: int  # of a part

    def runs(self, begin: int, end: int) -> Iterator[Run]:
        while begin < end:
            rank, skipped = divmod(begin, self.nbytes)
            length = min(self.nbytes - skipped, end - begin)
            file, base = self.bases[rank]
            yield Run(file, base + self.start + skipped, length)
            begin += length


@dataclass(frozen=True)
class Content:
    """The sources of a storage in an output file."""

    dtype: str
    layout: Layout
    slices: tuple[Slice, ...]
    how: str = "place"  # or "averaged", or "float32" (converted from `dtype`)
    stages: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # by slice that holds a copy: both stages

    @property
    def nbytes(self) -> int:
        """The size of the storage in the output."""
        return math.prod(self.layout.shape) * ITEM_SIZE["float32" if self.how == "float32" else self.dtype]


@dataclass(frozen=True)
class TorchOutput:
    """A file in torch.save's format. `contents` are the storages of the tensors in `value`, by key."""

    name: str  # below the output folder
    value: Any
    contents: dict[str, Content]

    @property
    def nbytes(self) -> int:
        return sum(content.nbytes for content in self.contents.values())


@dataclass(frozen=True)
class CopiedOutput:
    """A file of the checkpoint that is copied unchanged."""

    name: str
    file: int
    nbytes: int


Output = TorchOutput | CopiedOutput


@dataclass(frozen=True)
class Link:
    """An additional name of an output file."""

    name: str  # below the output folder
    file: str  # the name of the output


@dataclass(frozen=True)
class Plan:
    """A complete conversion."""

    files: tuple[File, ...]  # of the checkpoint
    outputs: tuple[Output, ...]
    links: tuple[Link, ...] = ()
    warnings: tuple[str, ...] = ()


# Constructors


def tensor(key: str, kind: ElementType, shape: Shape) -> TensorHeader:
    """A tensor that covers a complete storage of the output."""
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    storage = StorageHeader(key, kind.dtype, math.prod(shape), 0)
    return TensorHeader(storage, kind.dtype, 0, shape, stride, kind.requires_grad)


def with_copy(content: Content, slices: Sequence[Slice], stages: tuple[int, int]) -> Content:
    """The content of the first of two pipeline stages, to be compared with the slices of the second."""
    first, placed = len(content.slices), content.layout
    again = [
        replace(one, slice=one.slice + first) for one in (*placed.blocks, *placed.copies) if one.slice < len(slices)
    ]
    return replace(
        content,
        layout=replace(placed, copies=(*placed.copies, *again)),
        slices=(*content.slices, *slices),
        stages={**content.stages, **dict.fromkeys(range(first, first + len(slices)), stages)},
    )


def bare(name: str, kind: ElementType, placed: Layout, slice_: Slice) -> TorchOutput:
    return TorchOutput(name, tensor("0", kind, placed.shape), {"0": Content(kind.dtype, placed, (slice_,))})


def as_float32(name: str, model: ModelFile, weight: TensorHeader) -> TorchOutput:
    """A weight of the model as a main parameter."""
    if not weight.is_contiguous:
        raise UserError(f"{name}: the model's weight is not contiguous")
    how = "place" if weight.dtype == "float32" else "float32"
    run = Pieces.of([Run(model.file, weight.offset, weight.nbytes)] if weight.nbytes else [])
    content = Content(weight.dtype, layout.whole(weight.shape), (run,), how)
    param = tensor("0", ElementType("float32", weight.requires_grad), weight.shape)
    return TorchOutput(name, {"param": param}, {"0": content})


def saved(name: str, value: Any, file: int) -> TorchOutput:
    """A value from a file of the checkpoint, with the storages in it."""
    contents = {}
    for storage in storages_in(value):
        run = Pieces.of([Run(file, storage.offset, storage.nbytes)] if storage.nbytes else [])
        contents[storage.key] = Content(storage.dtype, layout.whole((storage.numel,)), (run,))
    return TorchOutput(name, value, contents)
