"""The layout of an entry in a torch_dist file: tensor bytes, and what torch.save puts around them. Pure."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_patches.formats.checkpoint import Extent
from ckpt_patches.formats.dtypes import UNTYPED, nbytes
from ckpt_patches.formats.torch_dist_writer import ARCHIVE
from ckpt_patches.formats.torch_file import StorageHeader, TensorHeader, storages_in
from ckpt_patches.formats.torch_writer import STORAGE_OF, Outline, outline, pickled

Storage = tuple[str, int]  # key, bytes


@dataclass(frozen=True)
class Torch:
    """The bytes that torch.save would write for a value."""

    pickle: bytes
    storages: tuple[Storage, ...]
    sources: tuple[tuple[Extent, ...], ...]  # by storage: the ranges to copy, in order
    places: tuple[int, ...]  # by storage: its first byte in the entry
    nbytes: int  # of the entry

    def around(self, checksums: Sequence[int]) -> list[tuple[int, bytes]]:
        """Everything except the storages: offsets and bytes. `checksums` are the storages'."""
        return _outline(self.pickle, self.storages, checksums).pieces


@dataclass(frozen=True)
class Raw:
    """An unchanged entry of the source."""

    extent: Extent

    @property
    def sources(self) -> tuple[tuple[Extent, ...], ...]:
        return ((self.extent,),)

    @property
    def places(self) -> tuple[int, ...]:
        return (0,)

    @property
    def nbytes(self) -> int:
        return self.extent.nbytes


def of_tensor(dtype: str, shape: tuple[int, ...], extents: tuple[Extent, ...]) -> Torch:
    """The entry of a tensor with these bytes."""
    data, storages, places, size = _of_tensor(dtype, shape)
    return Torch(data, storages, (extents,), places, size)


@functools.lru_cache(maxsize=65536)
def _of_tensor(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, tuple[Storage, ...], tuple[int, ...], int]:
    """The parts of a layout that depend only on dtype and shape."""
    numel, size = math.prod(shape), nbytes(dtype, math.prod(shape))
    typed = dtype in STORAGE_OF
    storage = StorageHeader("0", dtype if typed else UNTYPED, numel if typed else size, 0)
    stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    data, storages = pickled(TensorHeader(storage, dtype, 0, shape, stride)), (("0", size),)
    placed = _outline(data, storages, (0,))
    return data, storages, tuple(placed.places.values()), placed.nbytes


def of_value(value: Any, path: str) -> Torch:
    """The entry of a value whose tensors have their bytes in the file `path`."""
    found = storages_in(value)
    data, storages = pickled(value), tuple((own.key, own.nbytes) for own in found)
    placed = _outline(data, storages, (0,) * len(found))
    sources = tuple((Extent(path, own.offset, own.nbytes),) for own in found)
    return Torch(data, storages, sources, tuple(placed.places[key] for key, _ in storages), placed.nbytes)


def _outline(data: bytes, storages: Sequence[Storage], checksums: Sequence[int]) -> Outline:
    return outline(ARCHIVE, data, [(*own, crc) for own, crc in zip(storages, checksums, strict=True)])
