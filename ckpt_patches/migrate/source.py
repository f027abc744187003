"""Read an old checkpoint: its chunked arrays, its objects, and its unsharded state. No element is read."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_patches.errors import UserError
from ckpt_patches.formats import megatron_arrays, torch_dist, torch_dist_reader, torch_file, zarr
from ckpt_patches.formats.checkpoint import Checkpoint, Extent
from ckpt_patches.formats.damages import BAD_METADATA, NOT_READ
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.formats.reading import wrong_path
from ckpt_patches.formats.swiglu_rows import Mixed
from ckpt_patches.formats.torch_dist import COMMON, COMMON_OBJECT, INDEX, Tensor
from ckpt_patches.formats.torch_dist_reader import Chunked

EXPECTED = "one of Megatron's distributed checkpoints, in zarr or torch_dist"


@dataclass(frozen=True)
class Object:
    """An object that torch.save wrote: its bytes, and its value with stubs of classes and tensors."""

    extent: Extent
    value: Any


@dataclass(frozen=True)
class Source:
    """The checkpoint to migrate."""

    found: Checkpoint
    arrays: dict[str, Chunked]
    objects: dict[str, Object]  # by name
    mixed: dict[str, Mixed]  # arrays with rows that FSDP2 mixed, or may have, by name
    common: Object  # the unsharded state
    files: tuple[tuple[str, int, int], ...]  # see `files_in`

    @property
    def is_zarr(self) -> bool:
        """Whether objects are not in a list of one, as in torch_dist."""
        return self.found.format.endswith(megatron_arrays.ZARR)


def read(path: Path, *, trust: bool = False) -> Source:
    """The structure of a checkpoint.

    Raises:
        UserError: it is not a distributed Megatron checkpoint, is damaged, or names classes that are not listed.
    """
    backend = megatron_arrays.backend(path) if path.is_dir() else None
    if backend is None:
        raise wrong_path(path, EXPECTED)
    if backend not in megatron_arrays.BACKENDS:
        raise UserError(f"{path}: expected {EXPECTED}, found one in {backend}")
    files = files_in(path)
    found, arrays, objects, mixed = (_of_zarr if backend == megatron_arrays.ZARR else _of_torch_dist)(path, trust)
    held = objects.pop(COMMON_OBJECT, None)
    if held is None or (path / COMMON).exists():
        common = _object(torch_file.read(path / COMMON, trust=trust))
    else:
        common = Object(held.extent, held.value[0] if isinstance(held.value, list) and held.value else None)
    if not isinstance(common.value, dict):
        raise UserError(f"{path / COMMON}: expected a dict, found {type(common.value).__name__}")
    return Source(found, arrays, objects, mixed, common, files)


_Read = tuple[Checkpoint, dict[str, Chunked], dict[str, Object], dict[str, Mixed]]


def _of_torch_dist(path: Path, trust: bool) -> _Read:
    found, arrays, index = torch_dist_reader.read_chunked(path)
    _check_metadata(found)
    with RangedFiles() as files:
        objects = {
            name: Object(Extent(str(path / place.path), *place[1:]), torch_dist.read_place(files, path, place).value)
            for name, place in index.objects.items()
        }
    return found, arrays, objects, torch_dist_reader.mixed_rows(found, index)


def _of_zarr(path: Path, trust: bool) -> _Read:
    found = zarr.read(path)
    _check_metadata(found)
    there = {
        (stream.array, shard.label): stream.extents[0] for shard in found.shards for stream in shard.streams.values()
    }
    arrays = {}
    for array in map(zarr.read_array, zarr.arrays(path)):
        places = dict(array.places())
        extents = {at: there[array.name, label] for at, label in places.items() if (array.name, label) in there}
        tensor = Tensor(array.name, array.dtype, array.shape, None, dict.fromkeys(places, array.chunks))
        arrays[array.name] = Chunked(tensor, extents)
    files = {f"{file.parent.name}/{file.stem}": file for file in sorted(path.glob("*/shard_*.pt"))}
    return found, arrays, {name: _object(torch_file.read(file, trust=trust)) for name, file in files.items()}, {}


def _object(file: torch_file.TorchFile) -> Object:
    return Object(Extent(str(file.path), 0, file.size), file.value)


def _check_metadata(found: Checkpoint) -> None:
    """Check that the metadata of all arrays can be read; `read` checks the unsharded state itself."""
    for finding in found.findings:
        is_damaged = finding.kind is BAD_METADATA and finding.array not in (megatron_arrays.CONFIG, COMMON)
        if is_damaged or (finding.kind is NOT_READ and finding.array == INDEX):
            raise UserError(f"{found.path / finding.array} cannot be read, and nothing was written: {finding.detail}")


def files_in(path: Path) -> tuple[tuple[str, int, int], ...]:
    """All files of a checkpoint: name, bytes, modification time in ns, which differs for a rewritten file."""
    found = []
    for folder, _, names in os.walk(path):
        for name in names:
            status = os.stat(os.path.join(folder, name))
            found.append((os.path.relpath(os.path.join(folder, name), path), status.st_size, status.st_mtime_ns))
    return tuple(sorted(found))
