"""The files of the new checkpoint: where each entry lies in them, and how they are written."""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ckpt_patches.formats import torch_dist_writer
from ckpt_patches.formats.checkpoint import Extent
from ckpt_patches.formats.checksum import crc32
from ckpt_patches.formats.dtypes import UNTYPED, item_size
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.formats.torch_dist import COMMON, Offsets, Tensor
from ckpt_patches.formats.torch_file import StorageHeader, TensorHeader, storages_in
from ckpt_patches.formats.torch_writer import STORAGE_OF, Outline, outline, pickled
from ckpt_patches.runtime.durable import new_file

FILE = 256 << 20  # bytes of a file, about: large enough to be read quickly
BLOCK = 1 << 20  # bytes that are copied at a time


class Entry(NamedTuple):
    """What torch.save writes for a value, or bytes of the source as they are."""

    key: str  # in the index
    pickle: bytes  # empty for bytes as they are
    storages: tuple[tuple[str, tuple[Extent, ...]], ...]  # by key in the pickle: the byte ranges to copy, in order
    offsets: Offsets | None = None  # of a tensor's chunk; None for an object

    @property
    def layout(self) -> Outline:
        """The places of the storages, and what lies around them, with checksums of zero."""
        return _layout(self.pickle, tuple((key, sum(own.nbytes for own in extents)) for key, extents in self.storages))

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes


@functools.lru_cache(maxsize=4096)  # there can be tens of thousands of chunks, and few shapes
def _layout(data: bytes, sizes: tuple[tuple[str, int], ...]) -> Outline:
    if data:
        return outline(torch_dist_writer.ARCHIVE, data, [(*own, 0) for own in sizes])
    unchanged = Outline()
    unchanged.places = dict.fromkeys(dict(sizes), 0)
    unchanged.skip(sum(nbytes for _, nbytes in sizes))
    return unchanged


def unchanged(key: str, extent: Extent) -> Entry:
    """An entry of the source's bytes."""
    return Entry(key, b"", (("", (extent,)),))


def of_tensor(new: Tensor, offsets: Offsets, shape: tuple[int, ...], extents: tuple[Extent, ...]) -> Entry:
    """The entry of a tensor's chunk, whose elements are in these byte ranges."""
    return Entry(new.name, _pickled(new.dtype, shape), (("0", extents),), offsets)


@functools.lru_cache(maxsize=4096)
def _pickled(dtype: str, shape: tuple[int, ...]) -> bytes:
    numel, is_typed = math.prod(shape), dtype in STORAGE_OF
    storage = StorageHeader("0", dtype if is_typed else UNTYPED, numel if is_typed else numel * item_size(dtype), 0)
    stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return pickled(TensorHeader(storage, dtype, 0, shape, stride))


def of_value(key: str, value: Any, path: str) -> Entry:
    """The entry of a value whose tensors have their bytes in the file `path`."""
    storages = ((own.key, (Extent(path, own.offset, own.nbytes),)) for own in storages_in(value))
    return Entry(key, pickled(value), tuple(storages))


@dataclass(frozen=True)
class OutputFile:
    """A file of the new checkpoint: its entries, one after another."""

    name: str
    entries: tuple[Entry, ...]

    @functools.cached_property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def placed(self) -> Iterator[tuple[int, Entry]]:
        """The entries, with their first bytes."""
        begin = 0
        for entry in self.entries:
            yield begin, entry
            begin += entry.nbytes


def in_files(entries: Sequence[Entry]) -> Iterator[OutputFile]:
    """Divide the entries into files."""
    begins = itertools.accumulate((entry.nbytes for entry in entries), initial=0)
    pairs = zip(entries, begins, strict=False)
    for number, (_, own) in enumerate(itertools.groupby(pairs, key=lambda pair: pair[1] // FILE)):
        yield OutputFile(f"__0_{number}.distcp", tuple(entry for entry, _ in own))


def index(tensors: Iterable[Tensor], files: Iterable[OutputFile]) -> bytes:
    """The bytes of the index of these files; the tensors are without places."""
    described = {own.name: replace(own, places={}) for own in tensors}
    objects: dict[str, Extent] = {}
    for file in files:
        for begin, entry in file.placed():
            place = Extent(file.name, begin, entry.nbytes)
            if entry.offsets is not None:
                described[entry.key].places[entry.offsets] = place
            elif file.name != COMMON:
                objects[entry.key] = place
    return torch_dist_writer.index(described.values(), objects)


def write(file: OutputFile, folder: Path) -> int:
    """Write a file under a temporary name, and then rename it. Returns its size in bytes.

    Raises:
        OSError: the disk is full, or a file of the source cannot be read.
    """
    with new_file(folder / file.name) as out, RangedFiles() as files:
        for begin, entry in file.placed():
            _write_entry(out, begin, entry, files)
    return file.nbytes


def _write_entry(out: BinaryIO, begin: int, entry: Entry, files: RangedFiles) -> None:
    checksums = []
    for key, extents in entry.storages:
        out.seek(begin + entry.layout.places[key])
        checksums.append((key, sum(extent.nbytes for extent in extents), _copied(out, extents, files)))
    for offset, data in outline(torch_dist_writer.ARCHIVE, entry.pickle, checksums).pieces if entry.pickle else ():
        out.seek(begin + offset)
        out.write(data)


def _copied(out: BinaryIO, extents: Iterable[Extent], files: RangedFiles) -> int:
    """Copy byte ranges of the source. Returns their checksum."""
    found, buffer = 0, memoryview(bytearray(BLOCK))
    for extent in extents:
        for at in range(0, extent.nbytes, BLOCK):
            data = buffer[: min(BLOCK, extent.nbytes - at)]
            files.read(extent.path, extent.offset + at, data)
            found = crc32(data, found)
            out.write(data)
    return found
