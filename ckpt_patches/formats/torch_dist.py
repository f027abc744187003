"""The files of torch.distributed.checkpoint, as Megatron writes them: an index, and the files with the data.

`.metadata` is a pickle. It has the chunks of each tensor. For each chunk and each object it has a file
`__<rank>_<n>.distcp`, and the offset and length of what torch.save wrote there. A flattened tensor has the shape
(fragments of each axis, elements of a shard), with a chunk per data-parallel rank.
https://pytorch.org/docs/stable/distributed.checkpoint.html
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from ckpt_patches.errors import UserError
from ckpt_patches.formats import pickles, torch_file
from ckpt_patches.formats.checkpoint import Extent
from ckpt_patches.formats.paths import path_within
from ckpt_patches.formats.pickles import Instance
from ckpt_patches.formats.ranged import RangedFiles, read_metadata
from ckpt_patches.formats.torch_file import BadFileError, NotReadError, TensorHeader, TorchFile
from ckpt_patches.runtime.pause import without_garbage_collection
from ckpt_patches.runtime.shown import shown
from ckpt_patches.runtime.units import in_bytes

INDEX = ".metadata"
# Unsharded (common) state: a file, or since megatron-core 0.19 an object (a list of one item) in the sharded files.
COMMON, COMMON_OBJECT = "common.pt", "common_state/shard_0_1"

Offsets = tuple[int, ...]
LARGEST = pickles.LARGEST  # bytes of an index: some two million chunks
MEMORY = 15  # bytes of memory for each byte of an index


@dataclass(frozen=True)
class Tensor:
    """A tensor of the index. The paths of its places are below the checkpoint's folder."""

    name: str
    dtype: str  # torch's name
    size: tuple[int, ...]
    whole: tuple[int, ...] | None  # the shape before flattening; None if not flattened
    chunks: dict[Offsets, tuple[int, ...]]  # sizes by offsets
    places: dict[Offsets, Extent] = field(default_factory=dict)  # of the chunks, by offsets; some can be missing


@dataclass(frozen=True)
class Index:
    """The content of `.metadata`."""

    tensors: dict[str, Tensor]
    objects: dict[str, Extent]
    absent: tuple[str, ...] = ()  # entries that the index lists or a rank planned to write, without a place

    def same_places(self) -> Iterator[tuple[str, str]]:
        """Yield the names of each two entries with the same position."""
        first: dict[Extent, tuple[str, Offsets]] = {}
        for key, place in self._places():
            if (other := first.setdefault(place, key)) is not key:
                yield _called(*other), _called(*key)

    def _places(self) -> Iterator[tuple[tuple[str, Offsets], Extent]]:
        for name, tensor in self.tensors.items():
            yield from (((name, offsets), place) for offsets, place in tensor.places.items())
        yield from (((name, ()), place) for name, place in self.objects.items())


class ChunkError(NotReadError):
    """A chunk that is valid, and whose elements do not lie in the file in the order of its shape.

    It is not contiguous, such as a convolution's weight in `channels_last`, or it is a subclass of torch.Tensor, whose
    tensors are codes and scales, say.
    """

    def __init__(self, detail: str, file: TorchFile) -> None:
        super().__init__(detail)
        self.file = file


def read_index(folder: Path) -> Index:
    """Read the index of a checkpoint. Imports and runs nothing that it names.

    Raises:
        BadFileError: the index is missing, damaged, or names a file outside of the folder.
        NotReadError: it is too large, or a chunk is transformed.
    """
    path = folder / INDEX
    try:
        with without_garbage_collection():
            _check_size(path_within(folder, INDEX))
            return _index(folder, _Unpickler(read_metadata(path, LARGEST), path).load().fields)
    except UserError:
        raise
    except OSError as error:
        raise BadFileError(f"{path}: {error.strerror or error}") from None
    except Exception as error:  # a damaged pickle can raise anything; none of its code runs
        raise BadFileError(f"{path} is corrupt: {type(error).__name__}: {error}") from None


def _check_size(path: Path) -> None:
    """Refuse an index whose objects may not fit into memory."""
    if (size := path.stat().st_size) > LARGEST:
        raise NotReadError(
            f"{path}: expected an index of at most {in_bytes(LARGEST)} (about {in_bytes(MEMORY * LARGEST)} of memory), "
            f"found {in_bytes(size)}: load the checkpoint in its own framework, whose ranks need as much memory, and "
            "save it on fewer ranks, in fewer chunks"
        )


class _Entry:
    """A chunk, or its position. There can be millions, and a general stub is three times as large."""

    __slots__ = ("fields",)
    fields: dict[str, Any]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.fields = state


_OF_TORCH = "torch.distributed.checkpoint"


class _Unpickler(pickles.Unpickler):
    """Unpickles with stubs in place of all classes."""

    kept: ClassVar[Mapping[str, Any]] = {
        "torch.Size": ().__add__,  # takes only a tuple, and returns it: neither a copy nor a call of Python
        f"{_OF_TORCH}.metadata.ChunkStorageMetadata": _Entry,
        f"{_OF_TORCH}.metadata.MetadataIndex": _Entry,
        f"{_OF_TORCH}.filesystem._StorageInfo": _Entry,
    }


def _index(folder: Path, index: dict[str, Any]) -> Index:
    """Build the index from a pickle's value."""
    found = Index({}, {})
    for name, entry in index["state_dict_metadata"].items():
        if "chunks" in entry.fields and isinstance(name, str):
            found.tensors[name] = _tensor(name, entry.fields, index.get("mcore_data") or {})
    same = {name: dict(zip(own.chunks, own.chunks, strict=True)) for name, own in found.tensors.items()}
    for key, where in index["storage_data"].items():
        name, offsets, file, begin, nbytes = _stored(key, where)
        if not (type(begin) is type(nbytes) is int and begin >= 0 <= nbytes):
            raise ValueError(f"expected a place in a file, found {shown((begin, nbytes))}")
        place = tuple.__new__(Extent, (file, begin, nbytes))
        if name in found.tensors:
            key = _numbers(offsets)
            found.tensors[name].places[same[name].get(key, key)] = place  # keeps equal offsets in memory once
        elif isinstance(name, str):
            found.objects[name] = place
    of_tensors = {place.path for tensor in found.tensors.values() for place in tensor.places.values()}
    for file in of_tensors | {place.path for place in found.objects.values()}:
        path_within(folder, file)
    return replace(found, absent=tuple(_absent(index, found)))


def _stored(key: Any, place: Any) -> tuple[Any, ...]:
    where = place.fields
    if where.get("transform_descriptors"):
        raise NotReadError(f"{shown(where['relative_path'])} is written by {shown(where['transform_descriptors'])}")
    return key.fields["fqn"], key.fields.get("offset"), where["relative_path"], where["offset"], where["length"]


def _absent(index: dict[str, Any], found: Index) -> Iterator[str]:
    """Objects and chunks without a place. megatron-core's indexes also contain the write plans of all ranks."""
    there = found.tensors.keys() | found.objects.keys()
    planned = list(_planned(index.get("all_local_plans")))
    listed = [name for name in index["state_dict_metadata"] if isinstance(name, str)]
    yield from sorted({*listed, *(name for name, _ in planned)} - there)
    for name, offsets in planned:
        if name in found.tensors and offsets and offsets not in found.tensors[name].chunks:
            yield _called(name, offsets)


def _called(name: str, offsets: Offsets) -> str:
    return f"{name} at {offsets}" if offsets else name


def _planned(plans: Any) -> Iterator[tuple[str, Offsets]]:
    """Yield name and offsets of each item in the plans. Plans in an unknown form are skipped."""
    for plan in plans if isinstance(plans, list) else ():
        for item in getattr(plan, "fields", {}).get("items") or ():
            place = getattr(getattr(item, "fields", {}).get("index"), "fields", {})
            name, offsets = place.get("fqn"), place.get("offset")
            if isinstance(name, str):
                yield name, tuple(offsets) if isinstance(offsets, (tuple, list)) else ()


def _tensor(name: str, entry: dict[str, Any], of_megatron: dict[str, dict[str, Any]]) -> Tensor:
    dtype = entry["properties"].state[0] if isinstance(entry["properties"].state, tuple) else None
    dtype = dtype or entry["properties"].fields["dtype"]
    chunks = {_numbers(chunk.fields["offsets"]): _numbers(chunk.fields["sizes"]) for chunk in entry["chunks"]}
    size, whole = _numbers(entry["size"]), of_megatron.get(name, {}).get("nd_reformulated_orig_global_shape")
    if {*map(len, chunks), *map(len, chunks.values())} - {len(size)}:
        raise ValueError(f"expected chunks of {len(size)} dimensions in {name}, found {shown(chunks)}")
    return Tensor(name, dtype.__name__, size, None if whole is None else _numbers(whole), chunks)


def _numbers(values: Any) -> tuple[int, ...]:
    """Check offsets or sizes."""
    found = tuple(values)
    for value in found:
        if type(value) is not int or value < 0:
            raise ValueError(f"expected offsets or sizes, found {shown(found)}")
    return found


def read_place(files: RangedFiles, folder: Path, place: Extent) -> TorchFile:
    """Read what torch.save wrote at a place of the index. Classes become stubs.

    Raises:
        BadFileError: the file is missing or too short, or the data is damaged.
        NotReadError: the data is in torch's format before 1.6.
    """
    path = _path(folder, place.path)
    try:
        descriptor = files.descriptor(str(path))
    except OSError as error:
        raise BadFileError(f"{path}: {error.strerror or error}") from None
    return torch_file.read_within(descriptor, path, (place.offset, place.nbytes))


@functools.lru_cache(maxsize=1024)
def _path(folder: Path, file: str) -> Path:
    """The path of a file. Cached, because each of its many chunks is read separately."""
    return folder / file


def read_chunk(files: RangedFiles, folder: Path, tensor: Tensor, offsets: Offsets) -> TorchFile:
    """Read a chunk, which must have a place, and check that it is a contiguous tensor as the index describes it.

    Raises:
        BadFileError, NotReadError: as in `read_place`; or the tensor there is a different one or not contiguous.
    """
    found = read_place(files, folder, tensor.places[offsets])
    header, shape = found.value, tensor.chunks[offsets]
    if isinstance(header, TensorHeader) and (header.dtype, header.shape) == (tensor.dtype, shape):
        if header.is_contiguous:
            return found
        where = f"{tensor.name} at {offsets}"
        detail = f"{found.path}: the elements of {where} do not lie in order: strides {header.stride}"
        raise ChunkError(detail, found)
    what = f"{header.dtype} {list(header.shape)}" if isinstance(header, TensorHeader) else type(header).__name__
    at = f"at its byte {tensor.places[offsets].offset}"
    detail = f"{found.path}: expected {tensor.dtype} {list(shape)} {at}, found {what}"
    if isinstance(header, Instance):
        raise ChunkError(detail, found)
    raise BadFileError(detail)
