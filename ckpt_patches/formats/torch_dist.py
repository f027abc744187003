"""The files of torch.distributed.checkpoint, as Megatron writes them: an index, and what it says lies where.

`.metadata` is a pickle: of each tensor its chunks, and of each chunk, and of each object, in which file
`__<rank>_<n>.distcp` it lies, from which byte on, and how many bytes: what torch.save has written there. A flattened
tensor has the shape (fragments of each axis, elements of a shard), with a chunk for each data-parallel rank.
https://pytorch.org/docs/stable/distributed.checkpoint.html
"""

import functools
import io
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_patches.errors import UserError
from ckpt_patches.formats import pickles, torch_file
from ckpt_patches.formats.paths import path_within
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.formats.torch_file import BadFileError, NotReadError, TensorHeader, TorchFile
from ckpt_patches.runtime.pause import without_garbage_collection
from ckpt_patches.runtime.shown import shown

INDEX = ".metadata"
# What is not sharded: a file of its own, or since megatron-core 0.19 an object, a list of one, in the sharded files.
COMMON, COMMON_OBJECT = "common.pt", "common_state/shard_0_1"

Offsets = tuple[int, ...]
LARGE = 8 << 20  # bytes of an index
REPEATED = frozenset(("ChunkStorageMetadata", "MetadataIndex", "WriteItem"))  # its classes with very many objects


class Place(NamedTuple):
    """A part of a file."""

    file: str  # its name in the checkpoint's folder
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Tensor:
    """A tensor of the index."""

    name: str
    dtype: str  # torch's name
    size: tuple[int, ...]
    whole: tuple[int, ...] | None  # the shape that a flattened one was made of
    chunks: dict[Offsets, tuple[int, ...]]  # their sizes
    places: dict[Offsets, Place] = field(default_factory=dict)  # of the chunks; one can be missing


@dataclass(frozen=True)
class Index:
    """What `.metadata` says."""

    tensors: dict[str, Tensor]
    objects: dict[str, Place]
    absent: tuple[str, ...] = ()  # what the index lists, or a rank has planned to write, and has no place

    def same_places(self) -> Iterator[tuple[str, str]]:
        """Two entries that are at the same bytes, by their names."""
        begins: dict[str, set[int]] = {}  # an index can have millions: of those alone that are the same more is kept
        same: set[tuple[str, int]] = set()
        for places in (*(tensor.places.values() for tensor in self.tensors.values()), self.objects.values()):
            for file, begin, _ in places:
                known = begins.setdefault(file, set())
                if begin in known:
                    same.add((file, begin))
                known.add(begin)
        first: dict[tuple[str, int], tuple[str, Offsets]] = {}
        for key, (file, begin, _) in self._places() if same else ():
            if (file, begin) in same and (other := first.setdefault((file, begin), key)) is not key:
                yield _called(*other), _called(*key)

    def _places(self) -> Iterator[tuple[tuple[str, Offsets], Place]]:
        for name, tensor in self.tensors.items():
            yield from (((name, offsets), place) for offsets, place in tensor.places.items())
        yield from (((name, ()), place) for name, place in self.objects.items())


class NotContiguousError(NotReadError):
    """A tensor whose elements do not lie in the order of its shape, as of a convolution in `channels_last`."""

    def __init__(self, message: str, file: TorchFile) -> None:
        super().__init__(message)
        self.file = file


def read_index(folder: Path) -> Index:
    """The index of a checkpoint. Nothing that it names is imported or run.

    Raises:
        BadFileError: it is missing, damaged, or names a file outside of the folder.
    """
    path = folder / INDEX
    try:
        with without_garbage_collection():
            return _large_index(folder, path) or _index(folder, _load(path.read_bytes()).fields)
    except UserError:
        raise
    except OSError as error:
        raise BadFileError(f"{path}: {error.strerror or error}") from None
    except Exception as error:  # a damaged pickle can raise anything; none of its code runs
        raise BadFileError(f"{path} is corrupt: {type(error).__name__}: {error}") from None


class _Entry:
    """A chunk, or where one lies: there can be millions, and a stand-in for any class is three times as large."""

    __slots__ = ("fields",)
    fields: dict[str, Any]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.fields = state


class _Unpickler(pickle.Unpickler):
    """Finds stand-ins only."""

    def find_class(self, module: str, name: str) -> Any:
        return _found_class(module, name)


def _found_class(module: str, name: str) -> Any:
    return _KEPT.get(f"{module}.{name}") or torch_file.stand_in(module, name)


def _load(data: bytes) -> Any:
    pickles.check(data)
    return _Unpickler(io.BytesIO(data)).load()


def _large_index(folder: Path, path: Path) -> Index | None:
    """The index of very many chunks, in a fraction of the memory; None if it is another one, or not sound."""
    if path.stat().st_size < LARGE:
        return None
    try:
        from ckpt_patches.formats import repetitions  # with NumPy, which the ordinary way does without

        loaded = repetitions.Loaded(path.read_bytes(), _found_class, REPEATED)
        found = _index(folder, loaded.value.fields, repetitions.starmap)
        loaded.check()
    except Exception:  # whatever it is, the ordinary way reads it, or tells what is wrong
        return None
    return found


_OF_TORCH = "torch.distributed.checkpoint"
_KEPT: dict[str, Any] = {
    "torch.Size": torch_file.Size,
    "collections.OrderedDict": torch_file.Ordered,
    f"{_OF_TORCH}.metadata.ChunkStorageMetadata": _Entry,
    f"{_OF_TORCH}.metadata.MetadataIndex": _Entry,
    f"{_OF_TORCH}.filesystem._StorageInfo": _Entry,
}


Rows = Callable[[Callable[..., tuple[Any, ...]], Iterable[tuple[Any, ...]]], Iterable[tuple[Any, ...]]]


def _index(folder: Path, index: dict[str, Any], rows: Rows = itertools.starmap) -> Index:
    """The index that a pickle holds. `rows` applies a function to objects, of which it can have many as arrays."""
    found = Index({}, {})
    for name, entry in index["state_dict_metadata"].items():
        if "chunks" in entry.fields and isinstance(name, str):
            found.tensors[name] = _tensor(name, entry.fields, index.get("mcore_data") or {}, rows)
    same = {name: dict(zip(own.chunks, own.chunks, strict=True)) for name, own in found.tensors.items()}
    for name, offsets, file, begin, nbytes in rows(_stored, index["storage_data"].items()):
        if not (type(begin) is type(nbytes) is int and begin >= 0 <= nbytes):
            raise ValueError(f"expected a place in a file, found {shown((begin, nbytes))}")
        place = tuple.__new__(Place, (file, begin, nbytes))
        if name in found.tensors:
            key = _numbers(offsets)
            found.tensors[name].places[same[name].get(key, key)] = place  # of equal offsets one is kept in memory
        elif isinstance(name, str):
            found.objects[name] = place
    for file in {place.file for tensor in found.tensors.values() for place in tensor.places.values()}:
        path_within(folder, file)
    for place in found.objects.values():
        path_within(folder, place.file)
    return replace(found, absent=tuple(_absent(index, found, rows)))


def _stored(key: Any, place: Any) -> tuple[Any, ...]:
    where = place.fields
    if where.get("transform_descriptors"):
        raise NotReadError(f"{shown(where['relative_path'])} is written by {shown(where['transform_descriptors'])}")
    return key.fields["fqn"], key.fields.get("offset"), where["relative_path"], where["offset"], where["length"]


def _absent(index: dict[str, Any], found: Index, rows: Rows) -> Iterator[str]:
    """Objects and chunks without a place. megatron-core keeps in an index what every rank has planned to write."""
    there = found.tensors.keys() | found.objects.keys()
    listed = [name for name in index["state_dict_metadata"] if isinstance(name, str)]
    planned = list(_planned(index.get("all_local_plans"), rows))
    yield from sorted({*listed, *(name for name, _ in planned)} - there)
    for name, offsets in planned:
        if name in found.tensors and offsets and offsets not in found.tensors[name].chunks:
            yield _called(name, offsets)


def _called(name: str, offsets: Offsets) -> str:
    return f"{name} at {offsets}" if offsets else name


def _planned(plans: Any, rows: Rows) -> Iterator[tuple[str, Offsets]]:
    """Name and place of each item of the plans; nothing of plans in a form that is not known here."""
    for plan in plans if isinstance(plans, list) else ():
        for name, offsets in rows(_planned_item, zip(getattr(plan, "fields", {}).get("items") or (), strict=False)):
            if isinstance(name, str):
                yield name, tuple(offsets) if isinstance(offsets, (tuple, list)) else ()


def _planned_item(item: Any) -> tuple[Any, Any]:
    own = getattr(getattr(item, "fields", {}).get("index"), "fields", {})
    return own.get("fqn"), own.get("offset")


def _tensor(name: str, entry: dict[str, Any], of_megatron: dict[str, dict[str, Any]], rows: Rows) -> Tensor:
    dtype = entry["properties"].state[0] if isinstance(entry["properties"].state, tuple) else None
    dtype = dtype or entry["properties"].fields["dtype"]
    described = rows(lambda chunk: (chunk.fields["offsets"], chunk.fields["sizes"]), zip(entry["chunks"], strict=False))
    chunks = {_numbers(offsets): _numbers(sizes) for offsets, sizes in described}
    size, whole = _numbers(entry["size"]), of_megatron.get(name, {}).get("nd_reformulated_orig_global_shape")
    if {*map(len, chunks), *map(len, chunks.values())} - {len(size)}:
        raise ValueError(f"expected chunks of {len(size)} dimensions in {name}, found {shown(chunks)}")
    return Tensor(name, dtype.__name__, size, None if whole is None else _numbers(whole), chunks)


def _numbers(values: Any) -> tuple[int, ...]:
    """Offsets or sizes."""
    found = tuple(values)
    for value in found:
        if type(value) is not int or value < 0:
            raise ValueError(f"expected offsets or sizes, found {shown(found)}")
    return found


def read_place(files: RangedFiles, folder: Path, place: Place) -> TorchFile:
    """What torch.save has written at a place of the index; classes come out as stand-ins.

    Raises:
        BadFileError: the file is missing or shorter, or what lies there is damaged.
        NotReadError: it is in torch's format before 1.6.
    """
    path = _path(folder, place.file)
    try:
        descriptor = files.descriptor(str(path))
    except OSError as error:
        raise BadFileError(f"{path}: {error.strerror or error}") from None
    return torch_file.read_within(descriptor, path, (place.offset, place.nbytes))


@functools.lru_cache(maxsize=1024)
def _path(folder: Path, file: str) -> Path:
    """Of a file with many chunks, each of which is read by itself."""
    return folder / file


def read_chunk(files: RangedFiles, folder: Path, tensor: Tensor, offsets: Offsets) -> TorchFile:
    """A chunk of a tensor that has a place: what is there is a contiguous tensor, as the index says.

    Raises:
        BadFileError, NotReadError: as `read_place`; and where another tensor lies there, or one with other strides.
    """
    found = read_place(files, folder, tensor.places[offsets])
    header, shape = found.value, tensor.chunks[offsets]
    if not isinstance(header, TensorHeader) or (header.dtype, header.shape) != (tensor.dtype, shape):
        what = f"{header.dtype} {list(header.shape)}" if isinstance(header, TensorHeader) else type(header).__name__
        raise BadFileError(
            f"{found.path}: expected {tensor.dtype} {list(shape)} at its byte {tensor.places[offsets].offset}, "
            f"found {what}"
        )
    if not header.is_contiguous:
        detail = (
            f"{found.path}: the elements of {tensor.name} at {offsets} do not lie in order: strides {header.stride}"
        )
        raise NotContiguousError(detail, found)
    return found


def read_common(folder: Path, index: Index) -> Any:
    """What a checkpoint holds that is not sharded: from its file, or where that is not there, from its object.

    Raises:
        BadFileError, NotReadError: it cannot be read, or there is none.
    """
    path = folder / COMMON
    if path.exists() or COMMON_OBJECT not in index.objects:
        return torch_file.read(path, trust=True).value  # runs nothing; unknown classes are stand-ins
    with RangedFiles() as files:
        found = read_place(files, folder, index.objects[COMMON_OBJECT])
    if not isinstance(found.value, list) or len(found.value) != 1:
        raise BadFileError(f"{found.path}: expected a list of one as {COMMON_OBJECT}, found {shown(found.value)}")
    return found.value[0]
