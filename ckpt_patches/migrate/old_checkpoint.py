"""Read an old checkpoint with the audit's readers: chunked arrays, objects, and the unsharded state."""

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ckpt_patches.errors import UserError
from ckpt_patches.formats import megatron_arrays, torch_dist_reader, torch_file, zarr_reader
from ckpt_patches.formats.checkpoint import Checkpoint, Extent
from ckpt_patches.formats.damages import BAD_FILE, BAD_METADATA, NOT_READ
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.formats.swiglu_rows import Mixed
from ckpt_patches.formats.torch_dist import COMMON, COMMON_OBJECT, INDEX, Offsets, Place, read_place
from ckpt_patches.formats.zarr import Array as ZarrArray
from ckpt_patches.formats.zarr import arrays as arrays_in
from ckpt_patches.formats.zarr import read_array

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """A chunk of an array."""

    shape: Shape
    extent: Extent | None  # None if it is missing or truncated
    reason: str = ""  # why it cannot be read, with the file's name


@dataclass(frozen=True)
class Array:
    """A tensor that is saved in chunks. A flattened one has the shape (fragments per axis, elements per shard)."""

    name: str
    dtype: str  # torch's name
    shape: Shape
    whole: Shape | None  # original shape of a flattened array
    chunks: dict[Offsets, Chunk]  # by offset


@dataclass(frozen=True)
class Object:
    """An object that torch.save wrote next to the arrays: its place and its value."""

    key: str  # name, "/", index and count
    extent: Extent
    value: Any  # with stubs of classes and tensors
    is_list: bool  # wrapped in a list of one, as in torch_dist


@dataclass(frozen=True)
class Source:
    """The checkpoint to migrate."""

    found: Checkpoint  # its structure, as the audit reads it
    backend: str
    arrays: dict[str, Array]
    objects: tuple[Object, ...]
    common: torch_file.TorchFile | None  # file of the unsharded state; None if that is an object, as since 0.19
    settings: dict[str, Any]  # the unsharded state
    files: tuple[tuple[str, int, int], ...]  # all files: name, bytes, modification time in ns
    mixed: dict[str, Mixed] = field(default_factory=dict)  # by name: arrays with rows that FSDP2 mixed, or may have


def check(path: Path) -> str:
    """The format of one of Megatron's distributed checkpoints.

    Raises:
        UserError: it is not one of these.
    """
    if not path.is_dir():
        raise UserError(f"{path}: expected the folder of a checkpoint (iter_0001000), found none")
    backend = megatron_arrays.backend(path)
    if backend is None or backend not in megatron_arrays.BACKENDS:
        raise UserError(
            f"{path}: expected one of Megatron's distributed checkpoints, in zarr or torch_dist, found "
            f"{'one in ' + backend if backend else 'none'}: name the folder with metadata.json, like iter_0001000"
        )
    return backend


def read(path: Path, *, trust: bool = False) -> Source:
    """The structure of a checkpoint; no element is read.

    Raises:
        UserError: it is not a distributed Megatron checkpoint, is damaged, or names classes that are not listed.
    """
    backend = check(path)
    files = _files(path)
    found, arrays, objects, held, mixed = _READERS[backend](path, trust)
    for finding in found.findings:
        is_damaged = finding.kind is BAD_METADATA and finding.array not in (megatron_arrays.CONFIG, COMMON)
        if is_damaged or (finding.kind is NOT_READ and finding.array == INDEX):
            raise UserError(f"{path / finding.array} cannot be read, and nothing was written: {finding.detail}")
    common = torch_file.read(path / COMMON, trust=trust) if (path / COMMON).exists() or held is None else None
    unwrapped = held[0] if isinstance(held, list) and len(held) == 1 else held
    settings = unwrapped if common is None else common.value
    if not isinstance(settings, dict):
        raise UserError(f"{path / COMMON}: expected a dict, found {type(settings).__name__}")
    return Source(found, backend, arrays, objects, common, settings, files, mixed)


Read = tuple[Checkpoint, dict[str, Array], tuple[Object, ...], Any, dict[str, Mixed]]


def _of_torch_dist(path: Path, trust: bool) -> Read:
    found, chunked, index = torch_dist_reader.read_chunked(path)
    reasons = {(own.array, own.shard): own.detail for own in found.findings if own.kind in (BAD_FILE, NOT_READ)}
    arrays = {
        name: Array(
            name,
            own.tensor.dtype,
            own.tensor.size,
            own.tensor.whole,
            {
                at: Chunk(shape, own.extents.get(at), reasons.get((name, str(at)), ""))
                for at, shape in own.tensor.chunks.items()
            },
        )
        for name, own in chunked.items()
    }
    with RangedFiles() as files:
        objects = [_object(files, path, name, place) for name, place in index.objects.items()]
    held = [own.value for own in objects if own.key == COMMON_OBJECT]
    others = tuple(own for own in objects if own.key != COMMON_OBJECT)
    return found, arrays, others, held[0] if held else None, torch_dist_reader.mixed_rows(found, index)


def _object(files: RangedFiles, path: Path, name: str, place: Place) -> Object:
    """An object of the index. Its bytes stay unchanged, including the names of classes."""
    file = read_place(files, path, place)
    return Object(name, Extent(str(file.path), place.offset, place.nbytes), file.value, is_list=True)


def _of_zarr(path: Path, trust: bool) -> Read:
    found = zarr_reader.read(path)
    known = map(read_array, arrays_in(path))
    objects = tuple(map(partial(_zarr_object, trust=trust), sorted(path.glob("*/shard_*.pt"))))
    return found, {array.name: _zarr_array(array) for array in known}, objects, None, {}


def _zarr_array(array: ZarrArray) -> Array:
    chunks = {at: Chunk(array.chunks, _zarr_chunk(array, label)) for at, label in array.places()}
    return Array(array.name, array.dtype, array.shape, None, chunks)


def _zarr_chunk(array: ZarrArray, label: str) -> Extent | None:
    file = array.path / label
    try:
        is_whole = file.stat().st_size >= array.chunk_bytes
    except FileNotFoundError:
        return None
    return Extent(str(file), 0, array.chunk_bytes) if is_whole else None


def _zarr_object(path: Path, trust: bool) -> Object:
    """An object from its own file. It is written anew, in a list as in torch_dist."""
    file = torch_file.read(path, trust=trust)
    return Object(f"{path.parent.name}/{path.stem}", Extent(str(path), 0, file.size), file.value, is_list=False)


_READERS = {megatron_arrays.ZARR: _of_zarr, megatron_arrays.TORCH_DIST: _of_torch_dist}


def _files(path: Path) -> tuple[tuple[str, int, int], ...]:
    """All files of the checkpoint. A rewritten file has another modification time."""
    found = []
    for folder, _, names in os.walk(path):
        for name in names:
            status = os.stat(os.path.join(folder, name))
            found.append((os.path.relpath(os.path.join(folder, name), path), status.st_size, status.st_mtime_ns))
    return tuple(sorted(found))
