"""What a plan consists of: the files to write, and for each the ranges of the checkpoint's files that go into it."""

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
    """Bytes in one piece in a file of the checkpoint. A plan of a large model has millions of them."""

    file: int  # index of the file
    offset: int  # from the start of the file
    nbytes: int


class Slice(Protocol):
    """The flattened share of one tensor-parallel rank in a parameter's state, as it lies in the files of the ranks."""

    def runs(self, begin: int, end: int) -> Iterator[Run]:
        """Where the bytes from `begin` to `end` of the slice are."""


@dataclass(frozen=True)
class Pieces:
    """A slice of few runs, each of its own length."""

    pieces: tuple[Run, ...]
    ends: tuple[int, ...]  # in bytes of the slice

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
    """A slice that ranks hold equal parts of, at the same place of their group; hundreds of ranks take no memory."""

    bases: tuple[tuple[int, int], ...]  # by rank: file and offset of the group's flattened tensor; shared by many
    start: int  # bytes from there
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
    """What a storage of an output file is made of."""

    dtype: str
    layout: Layout
    slices: tuple[Slice, ...]
    how: str = "place"  # or "averaged", or "float32" (converted from `dtype`)
    stages: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # of a slice that holds another one again: both

    @property
    def nbytes(self) -> int:
        """Of the storage in the output."""
        return math.prod(self.layout.shape) * ITEM_SIZE["float32" if self.how == "float32" else self.dtype]


@dataclass(frozen=True)
class TorchOutput:
    """A file of torch.save. `value` holds tensors whose storages are `contents`, by their keys."""

    name: str  # below the output folder
    value: Any
    contents: dict[str, Content]

    @property
    def nbytes(self) -> int:
        return sum(content.nbytes for content in self.contents.values())


@dataclass(frozen=True)
class CopiedOutput:
    """A file of the checkpoint, as it is."""

    name: str
    file: int
    nbytes: int


Output = TorchOutput | CopiedOutput


@dataclass(frozen=True)
class Link:
    """Another name of a file of the output."""

    name: str  # below the output folder
    file: str  # its name as an output


@dataclass(frozen=True)
class Plan:
    """Everything that is to be done."""

    files: tuple[File, ...]  # of the checkpoint
    outputs: tuple[Output, ...]
    links: tuple[Link, ...] = ()
    warnings: tuple[str, ...] = ()


# How they are made


def tensor(key: str, kind: ElementType, shape: Shape) -> TensorHeader:
    """A tensor that is all of a storage of the output."""
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    storage = StorageHeader(key, kind.dtype, math.prod(shape), 0)
    return TensorHeader(storage, kind.dtype, 0, shape, stride, kind.requires_grad)


def with_copy(content: Content, slices: Sequence[Slice], stages: tuple[int, int]) -> Content:
    """What the first of two pipeline stages holds, compared with the slices of the second."""
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
    """A weight of the model, as the optimizer would have it."""
    if not weight.is_contiguous:
        raise UserError(f"{name}: the model's weight is not contiguous")
    how = "place" if weight.dtype == "float32" else "float32"
    run = Pieces.of([Run(model.file, weight.offset, weight.nbytes)] if weight.nbytes else [])
    content = Content(weight.dtype, layout.whole(weight.shape), (run,), how)
    param = tensor("0", ElementType("float32", weight.requires_grad), weight.shape)
    return TorchOutput(name, {"param": param}, {"0": content})


def saved(name: str, value: Any, file: int) -> TorchOutput:
    """A value of a file of the checkpoint, with the storages that it holds."""
    contents = {}
    for storage in storages_in(value):
        run = Pieces.of([Run(file, storage.offset, storage.nbytes)] if storage.nbytes else [])
        contents[storage.key] = Content(storage.dtype, layout.whole((storage.numel,)), (run,))
    return TorchOutput(name, value, contents)
