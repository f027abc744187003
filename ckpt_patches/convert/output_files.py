"""The parts of a plan: the files to write, and the ranges of the checkpoint's files that go into each."""

import bisect
import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ckpt_patches.convert import layout
from ckpt_patches.convert.layout import Layout
from ckpt_patches.errors import UserError
from ckpt_patches.formats.dtypes import ITEM_SIZE
from ckpt_patches.formats.stored_zip import Stored
from ckpt_patches.formats.torch_file import StorageHeader, TensorHeader, storages_in
from ckpt_patches.formats.zero import ElementType, Shape
from ckpt_patches.formats.zero_folder import Slice


class Run(NamedTuple):
    """A contiguous byte range in a file of the checkpoint."""

    path: str
    offset: int  # from the start of the file
    nbytes: int


class Runs(Protocol):
    """One tensor-parallel rank's flattened share of a parameter's state, located in the ranks' files."""

    def pieces(self) -> "Pieces": ...


@dataclass(frozen=True)
class Pieces:
    """A share in runs of different lengths."""

    runs: tuple[Run, ...]
    ends: tuple[int, ...]  # by run, in bytes of the share

    @classmethod
    def of(cls, *runs: Run) -> "Pieces":
        held = tuple(run for run in runs if run.nbytes)
        return cls(held, tuple(itertools.accumulate(run.nbytes for run in held)))

    def pieces(self) -> "Pieces":
        return self

    def within(self, begin: int, end: int) -> Iterator[Run]:
        """The runs with the bytes from `begin` to `end` of the share."""
        index = bisect.bisect_right(self.ends, begin)
        while begin < end:
            path, offset, nbytes = self.runs[index]
            skipped = begin - (self.ends[index] - nbytes)
            length = min(nbytes - skipped, end - begin)
            yield Run(path, offset + skipped, length)
            begin += length
            index += 1


class StateOf(NamedTuple):
    """A state of a slice. Its runs are made when the file is written: at stage 3 there is one for each rank."""

    slice: Slice
    key: str

    def pieces(self) -> Pieces:
        return Pieces.of(*self._runs())

    def _runs(self) -> Iterator[Run]:
        for part in self.slice.parts:
            if part.numel:
                flat, start = part.place(self.key)
                size = ITEM_SIZE[flat.type.dtype]
                yield Run(flat.file, flat.offset + start * size, part.numel * size)


@dataclass(frozen=True)
class Content:
    """The sources of a storage in an output file."""

    dtype: str
    layout: Layout
    slices: tuple[Runs, ...]
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
    path: Path
    nbytes: int


Output = TorchOutput | CopiedOutput


@dataclass(frozen=True)
class Link:
    """An additional name of an output file."""

    name: str  # below the output folder
    file: str  # the name of the output


class Records(NamedTuple):
    """The records of a file, in the order of their offsets. Arrays: workers share memory that they only read."""

    begins: "array[int]"
    ends: "array[int]"
    checksums: "array[int]"

    @classmethod
    def of(cls, stored: Iterable[Stored]) -> "Records":
        own = sorted(stored)
        columns = [one.offset for one in own], [one.offset + one.nbytes for one in own], [one.checksum for one in own]
        return cls(*(array("Q", column) for column in columns))


@dataclass(frozen=True)
class Plan:
    """A complete conversion."""

    outputs: tuple[Output, ...]
    links: tuple[Link, ...] = ()
    records: Mapping[str, Records] = field(default_factory=dict)  # by file of the checkpoint
    warnings: tuple[str, ...] = ()


# Constructors


def tensor(key: str, kind: ElementType, shape: Shape) -> TensorHeader:
    """A tensor that covers a complete storage of the output."""
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    storage = StorageHeader(key, kind.dtype, math.prod(shape), 0)
    return TensorHeader(storage, kind.dtype, 0, shape, stride, kind.requires_grad)


def with_copy(content: Content, slices: Sequence[Runs], stages: tuple[int, int]) -> Content:
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


def as_float32(name: str, path: Path, weight: TensorHeader) -> TorchOutput:
    """A weight of the model as a main parameter."""
    if not weight.is_contiguous:
        raise UserError(f"{name}: the model's weight is not contiguous")
    how = "place" if weight.dtype == "float32" else "float32"
    pieces = Pieces.of(Run(str(path), weight.offset, weight.nbytes))
    content = Content(weight.dtype, layout.whole(weight.shape), (pieces,), how)
    param = tensor("0", ElementType("float32", weight.requires_grad), weight.shape)
    return TorchOutput(name, {"param": param}, {"0": content})


def saved(name: str, value: Any, path: Path | str) -> TorchOutput:
    """A value from a file of the checkpoint, with the storages in it."""
    contents = {}
    for storage in storages_in(value):
        pieces = Pieces.of(Run(str(path), storage.offset, storage.nbytes))
        contents[storage.key] = Content(storage.dtype, layout.whole((storage.numel,)), (pieces,))
    return TorchOutput(name, value, contents)
