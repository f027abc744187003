"""Zarr arrays as Megatron writes them: a folder per array, with `.zarray` and a file of raw bytes per chunk.

The format: Zarr v2 without compression, chunks in C order; see https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html.
"""

import itertools
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_patches.formats import damages, tensor_streams
from ckpt_patches.formats.checkpoint import WEIGHT, Checkpoint, Extent, Shard, Stream
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.dtypes import ITEM_SIZE
from ckpt_patches.formats.megatron_arrays import (
    OF_AN_ARRAY,
    by_parameter,
    check_config,
    check_promises,
    check_siblings,
    is_of_distributed,
    name_other_cuts,
    parameter_and_role,
    set_common,
)
from ckpt_patches.formats.megatron_names import is_bucket
from ckpt_patches.formats.megatron_torch import check_bucket_sizes, check_weights, judge_object
from ckpt_patches.formats.paths import LeavesFolderError, path_within
from ckpt_patches.formats.pickles import MOST_DIMENSIONS
from ckpt_patches.formats.ranged import read_metadata
from ckpt_patches.formats.torch_dist import COMMON
from ckpt_patches.formats.torch_file import BadFileError, NotReadError
from ckpt_patches.runtime.shown import shown

LARGEST = 1 << 20  # bytes of the metadata
METADATA, ATTRIBUTES = OF_AN_ARRAY, ".zattrs"  # an array's files beside its chunks
SHARD = re.compile(r"shard_(\d{1,9}(?:\.\d{1,9}){0,9})_(\d{1,9}(?:\.\d{1,9}){0,9})\.pt")  # index and number of parts
LOCKS = ".sync"  # suffix of the folder with an array's locks
MOST_MISSING = 100_000  # chunks of an array; if more are missing, the shape is wrong
# torch's dtype by zarr's. Dtypes that NumPy lacks have the names of ml_dtypes.
DTYPES = {
    **{f"<f{size}": f"float{8 * size}" for size in (2, 4, 8)},
    **{f"<i{size}": f"int{8 * size}" for size in (2, 4, 8)},
    **{f"<u{size}": f"uint{8 * size}" for size in (2, 4, 8)},
    **{f"<c{size}": f"complex{8 * size}" for size in (8, 16)},
    "|i1": "int8",
    "|u1": "uint8",
    "|b1": "bool",
    **{name: name for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")},
    "float8_e8m0fnu": "float8_e8m0fnu",
}


@dataclass(frozen=True)
class Array:
    """The metadata of one array."""

    path: Path  # its folder
    dtype: str  # torch's name
    shape: tuple[int, ...]
    chunks: tuple[int, ...]  # shape of a chunk
    separator: str = "."

    @property
    def name(self) -> str:
        return self.path.name

    def labels(self) -> Iterator[str]:
        """The file names of all chunks."""
        grid = [range(-(-size // chunk)) for size, chunk in zip(self.shape, self.chunks, strict=True)]
        for index in itertools.product(*grid):
            yield self.separator.join(map(str, index)) or "0"

    def places(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """The offsets of each chunk's first element, and the chunk's file name."""
        grid = [range(0, size, chunk) for size, chunk in zip(self.shape, self.chunks, strict=True)]
        return zip(itertools.product(*grid), self.labels(), strict=True)

    @property
    def chunk_bytes(self) -> int:
        """Bytes per chunk. Chunks at an edge also have the full size."""
        return math.prod(self.chunks) * ITEM_SIZE[self.dtype]


def arrays(path: Path) -> list[Path]:
    """The folders of a checkpoint's arrays, without folders of locks."""
    folders = [folder for folder in sorted(path.iterdir()) if folder.is_dir() and not folder.name.endswith(LOCKS)]
    return [folder for folder in folders if is_array(folder)]


def is_array(folder: Path) -> bool:
    """Whether a folder has an array. An array without metadata still has its chunks."""
    return (folder / METADATA).exists() or any(file.name[0].isdigit() for file in folder.iterdir())


def _check_links(folder: Path) -> None:
    """Refuse an array with a file that is a link out of the checkpoint, whose content a conversion would copy."""
    within = (os.path.join(base, name) for base, folders, files in os.walk(folder) for name in (*folders, *files))
    for path in filter(os.path.islink, (str(folder), *within)):
        path_within(folder.parent, os.path.relpath(path, folder.parent))


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > MOST_DIMENSIONS or any(type(value) is not int for value in values):
        raise ValueError(f"expected a list of numbers, found {shown(values)}")
    return tuple(values)


def read_array(folder: Path) -> Array:
    """Read the metadata of an array.

    Raises:
        BadFileError: the metadata is missing or invalid.
        NotReadError: the chunks are not raw bytes in C order, or have an unknown dtype.
    """
    path = folder / METADATA
    try:
        _check_links(folder)
        metadata = json.loads(read_metadata(path, LARGEST))
        shape, chunks = (_numbers(metadata[key]) for key in ("shape", "chunks"))
        if len(shape) != len(chunks) or any(n < 0 for n in shape) or any(n < 1 for n in chunks):
            raise ValueError(f"expected chunks {chunks} to divide the shape {shape}")
        dtype, separator = metadata["dtype"], metadata.get("dimension_separator", ".")
        if separator not in (".", "/"):
            raise ValueError(f"expected . or / between the numbers of a chunk, found {shown(separator)}")
        raw = metadata["compressor"] is None and not metadata["filters"] and metadata["order"] == "C"
    except LeavesFolderError as error:
        raise NotReadError(str(error)) from None
    except OSError as error:
        raise BadFileError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BadFileError(f"{path} is corrupt: {type(error).__name__}: {error}") from None
    expected, there = (
        math.prod(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True)),
        len(os.listdir(folder)),
    )
    if expected > MOST_MISSING + there:
        raise BadFileError(f"{path}: {expected} chunks by its shape {list(shape)}, and there are {there} files")
    if not raw:
        raise NotReadError(f"{path}: expected raw chunks in C order, which is what Megatron writes")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise NotReadError(f"{path}: expected a type of elements that is known here, found {shown(dtype)}")
    return Array(folder, DTYPES[dtype], shape, chunks, separator)


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint, with findings for the problems of its files."""
    found = Checkpoint(path, "megatron zarr")
    check_config(found)
    if (common := tensor_streams.read(path / COMMON, found, damages.BAD_METADATA)) is not None:
        set_common(found, common, is_distributed=any(map(is_of_distributed, os.listdir(path))))
    locks = sorted(folder.name for folder in path.glob(f"*{LOCKS}") if folder.is_dir())
    found.findings += [Finding(damages.LOCK_DIRECTORY, name) for name in locks]
    folders = arrays(path)
    names = [folder.name for folder in folders]
    known = {array.name: array for folder in folders if (array := _array(folder, found))}
    for parameter, roles in by_parameter(known).items():
        found.shards += _shards(parameter, roles, found)
    objects: dict[str, Any] = {}
    numels = [_read_object(file, found, objects) for file in sorted(path.glob("*/shard_*.pt"))]
    check_bucket_sizes(found, objects)
    if sum(numel > 0 for numel in numels) == 1:  # there is one model-parallel rank
        of_weights = [array for name, array in known.items() if parameter_and_role(name)[1] == WEIGHT]
        weights = [math.prod(array.chunks) for array in of_weights for _ in array.labels()]  # each layer has its own
        check_weights(found, "the model's weights", sum(numels), weights)
    _check_objects(found)
    dtypes = {name: known[name].dtype if name in known else "" for name in names}
    check_siblings(found, dtypes)  # needs the settings, which can be in an object
    check_promises(found, names)
    return found


def _read_object(path: Path, found: Checkpoint, objects: dict[str, Any]) -> int:
    """Read a file into `objects`. Returns the number of elements that it states for the optimizer's buckets."""
    name = path.parent.name
    file = tensor_streams.read_file(path, found)
    if file is None:
        return 0
    objects[name] = file.value
    return judge_object(found, file, name)


def _check_objects(found: Checkpoint) -> None:
    """Check that each object has all of its files. The name of a file states how many exist."""
    for folder in sorted(path for path in found.path.iterdir() if path.is_dir() and path.suffix != LOCKS):
        names = {path.name for path in folder.iterdir()}
        if METADATA in names:
            continue
        parts = [(name[1].split("."), name[2].split(".")) for name in map(SHARD.fullmatch, names) if name]
        counts = {math.prod(map(int, size)) for place, size in parts if len(place) == len(size)}
        if not names or any(count != len(names) for count in counts):
            detail = f"{len(names)} files of the object, expected {max(counts, default=1)}"
            found.add(damages.BAD_FILE, folder.name, detail)


def _array(folder: Path, found: Checkpoint) -> Array | None:
    """The array of a folder; None, and a finding, if it cannot be read."""
    try:
        return read_array(folder)
    except (BadFileError, NotReadError) as error:
        found.findings.append(tensor_streams.refused(error, folder.name, damage=damages.BAD_METADATA))
        return None


def _shards(parameter: str, roles: dict[str, Array], found: Checkpoint) -> list[Shard]:
    """The shards of one parameter. Arrays with the same chunk grid share their shards."""
    shards = []
    name_other_cuts(found, {role: (array.name, (array.shape, array.chunks)) for role, array in roles.items()})
    for grid in dict.fromkeys((array.shape, array.chunks) for array in roles.values()):
        alike = {role: array for role, array in roles.items() if (array.shape, array.chunks) == grid}
        for begin, label in next(iter(alike.values())).places():
            chunks = {role: _chunk(array, label, found) for role, array in alike.items()}
            streams, lost = (
                {role: c for role, (c, there) in chunks.items() if there is want} for want in (True, False)
            )
            has_rows = not is_bucket(parameter)
            own = Shard(parameter, label, grid[1], streams, lost, has_rows, begin=begin if has_rows else ())
            shards.append(own)
    _check_strays(roles, found)
    return shards


def _chunk(array: Array, label: str, found: Checkpoint) -> tuple[Stream, bool]:
    """The stream of one chunk, and whether all of its bytes exist."""
    file = array.path / label
    stream = Stream(array.name, array.dtype, (Extent(str(file), 0, array.chunk_bytes),))
    try:
        nbytes = file.stat().st_size
    except FileNotFoundError:
        found.findings.append(_chunk_finding(damages.MISSING_CHUNK, array, label, ""))
        return stream, False
    if nbytes != array.chunk_bytes:
        kind = damages.SHORT_CHUNK if nbytes < array.chunk_bytes else damages.LONG_CHUNK
        found.findings.append(_chunk_finding(kind, array, label, f"{nbytes} bytes of {array.chunk_bytes}"))
    return stream, nbytes >= array.chunk_bytes


def _chunk_finding(kind: damages.FindingKind, array: Array, label: str, detail: str) -> Finding:
    return Finding(kind, array.name, detail, shard=label, begin=0, end=math.prod(array.chunks))


def _check_strays(roles: dict[str, Array], found: Checkpoint) -> None:
    """Report files that do not belong to the array's chunk grid."""
    for array in roles.values():
        expected = {METADATA, ATTRIBUTES, *array.labels()}
        strays = sorted({file.name for file in array.path.iterdir()} - expected)
        if strays:
            found.add(damages.STRAY_FILE, array.name, ", ".join(strays[:5]))
