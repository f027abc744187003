"""The files of torch.distributed.checkpoint, as Megatron writes them: an index, and the files with the data.

`.metadata` is a pickle. It has the chunks of each tensor. For each chunk and each object it has a file
`__<rank>_<n>.distcp`, and the offset and length of what torch.save wrote there. A flattened tensor has the shape
(fragments of each axis, elements of a shard), with a chunk per data-parallel rank.
https://pytorch.org/docs/stable/distributed.checkpoint.html
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ckpt_patches.errors import UserError
from ckpt_patches.formats import pickles, torch_file
from ckpt_patches.formats.checkpoint import Extent
from ckpt_patches.formats.paths import path_within
from ckpt_patches.formats.ranged import RangedFiles, read_metadata
from ckpt_patches.formats.torch_file import BadFileError, NotReadError, TorchFile
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
    same_places: tuple[tuple[str, str], ...] = ()  # names of each two entries with one place


def read_index(folder: Path) -> Index:
    """Read the index of a checkpoint. Imports and runs nothing that it names.

    Raises:
        BadFileError: the index is missing, damaged, or names a file outside of the folder.
        NotReadError: it is too large, or a chunk is transformed.
    """
    path = folder / INDEX
    try:
        with without_garbage_collection():
            if (size := path_within(folder, INDEX).stat().st_size) > LARGEST:
                raise NotReadError(
                    f"{path}: expected an index of at most {in_bytes(LARGEST)} (about {in_bytes(MEMORY * LARGEST)} of "
                    f"memory), found {in_bytes(size)}: load the checkpoint in its own framework, whose ranks need as "
                    "much memory, and save it on fewer ranks, in fewer chunks"
                )
            return _index(folder, _Unpickler(read_metadata(path, LARGEST), path).load().fields)
    except UserError:
        raise
    except OSError as error:
        raise BadFileError(f"{path}: {error.strerror or error}") from None
    except Exception as error:  # a damaged pickle can raise anything; none of its code runs
        raise BadFileError(f"{path} is corrupt: {type(error).__name__}: {error}") from None


class _Entry:
    """A chunk, or its position. There can be millions, and a general stub is three times as large."""

    __slots__ = ("fields",)
    fields: dict[str, Any]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.fields = state


class _Unpickler(pickles.Unpickler):
    """Unpickles with stubs in place of all classes."""

    kept: ClassVar[Mapping[str, Any]] = {
        "torch.Size": ().__add__,  # takes only a tuple, and returns it: neither a copy nor a call of Python
        "torch.distributed.checkpoint.metadata.ChunkStorageMetadata": _Entry,
        "torch.distributed.checkpoint.metadata.MetadataIndex": _Entry,
        "torch.distributed.checkpoint.filesystem._StorageInfo": _Entry,
    }


def _index(folder: Path, index: dict[str, Any]) -> Index:
    """Build the index from a pickle's value."""
    listed = {name: entry.fields for name, entry in index["state_dict_metadata"].items() if isinstance(name, str)}
    of_megatron = index.get("mcore_data") or {}
    tensors = {name: _tensor(name, own, of_megatron) for name, own in listed.items() if "chunks" in own}
    same = {name: dict(zip(own.chunks, own.chunks, strict=True)) for name, own in tensors.items()}
    objects: dict[str, Extent] = {}
    first: dict[Extent, tuple[str, Offsets]] = {}
    twice = []
    for key, where in index["storage_data"].items():
        name, place = key.fields["fqn"], where.fields
        if not isinstance(name, str):
            continue
        if place.get("transform_descriptors"):
            raise NotReadError(f"{shown(place['relative_path'])} is written by {shown(place['transform_descriptors'])}")
        extent = tuple.__new__(Extent, (place["relative_path"], place["offset"], place["length"]))
        if not (type(extent.offset) is type(extent.nbytes) is int and extent.offset >= 0 <= extent.nbytes):
            raise ValueError(f"expected a place in a file, found {shown(extent)}")
        offsets: Offsets = ()
        if name in tensors:
            offsets = _numbers(key.fields.get("offset"))
            tensors[name].places[same[name].get(offsets, offsets)] = extent  # keeps equal offsets in memory once
        else:
            objects[name] = extent
        if (other := first.setdefault(extent, (name, offsets))) != (name, offsets):
            twice.append((_called(*other), _called(name, offsets)))
    for file in {extent.path for extent in first}:
        path_within(folder, file)
    planned = [*_planned(index.get("all_local_plans"))]
    absent = sorted({*listed, *(key.fields["fqn"] for key in planned)} - tensors.keys() - objects.keys())
    for key in planned:
        tensor, offsets = tensors.get(key.fields["fqn"]), key.fields.get("offset")
        are_numbers = isinstance(offsets, tuple) and {*map(type, offsets)} == {int}
        if tensor is not None and are_numbers and offsets not in tensor.chunks:
            absent.append(_called(tensor.name, offsets))
    return Index(tensors, objects, tuple(absent), tuple(twice))


def _planned(plans: Any) -> Iterator[Any]:
    """The key of each entry in the ranks' write plans, which megatron-core 0.15 keeps. Other forms are skipped."""
    for plan in plans if isinstance(plans, list) else ():
        for item in getattr(plan, "fields", {}).get("items") or ():
            key = getattr(item, "fields", {}).get("index")
            if isinstance(getattr(key, "fields", {}).get("fqn"), str):
                yield key


def _called(name: str, offsets: Offsets) -> str:
    return f"{name} at {offsets}" if offsets else name


def _tensor(name: str, entry: dict[str, Any], of_megatron: dict[str, dict[str, Any]]) -> Tensor:
    properties = entry["properties"]
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.fields["dtype"]
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
