"""Megatron's distributed checkpoints in zarr: a directory an array, a file a chunk: one rank's shard as raw bytes.

The format: Zarr v2 without compression, chunks in C order; see https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html.
"""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpt_patches.audit import damages
from ckpt_patches.audit.checkpoint import Checkpoint, Extent, Shard, Stream
from ckpt_patches.audit.damages import Finding
from ckpt_patches.audit.megatron import by_parameter, check_siblings, is_bucket, read_common

LOCKS = ".sync"  # what a lock directory's name ends in
ITEM_SIZE = {
    "<f4": ("float32", 4),
    "<f2": ("float16", 2),
    "<f8": ("float64", 8),
    "bfloat16": ("bfloat16", 2),
    "|u1": ("uint8", 1),
    "|i1": ("int8", 1),
    "|b1": ("bool", 1),
    "<i2": ("int16", 2),
    "<i4": ("int32", 4),
    "<i8": ("int64", 8),
}


@dataclass(frozen=True)
class Array:
    """The metadata of one array."""

    name: str
    dtype: str  # torch's name
    item_size: int  # bytes
    shape: tuple[int, ...]
    chunks: tuple[int, ...]  # the shape of one
    separator: str = "."

    def labels(self) -> Iterator[str]:
        """The names of all chunks' files."""
        grid = [range(-(-size // chunk)) for size, chunk in zip(self.shape, self.chunks, strict=True)]
        for index in itertools.product(*grid):
            yield self.separator.join(map(str, index)) or "0"

    @property
    def chunk_bytes(self) -> int:
        """Each is written whole, also at an edge."""
        return math.prod(self.chunks) * self.item_size


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint; what is wrong with its files is among the findings."""
    found = Checkpoint(path, "megatron zarr")
    read_common(found)
    arrays = [array for folder in sorted(path.iterdir()) if folder.is_dir() for array in _array(folder, found)]
    parameters = by_parameter({array.name: array for array in arrays})
    check_siblings(found, {name: {role: a.name for role, a in roles.items()} for name, roles in parameters.items()})
    for parameter, roles in parameters.items():
        found.shards += _shards(parameter, roles, found)
    return found


def _array(folder: Path, found: Checkpoint) -> list[Array]:
    """The array of a directory, if it is one that can be read."""
    if folder.name.endswith(LOCKS):
        found.findings.append(Finding(damages.LOCK_DIRECTORY, folder.name))
        return []
    metadata = folder / ".zarray"
    if not metadata.exists():
        if any(file.name[0].isdigit() for file in folder.iterdir()):
            found.findings.append(Finding(damages.BAD_METADATA, folder.name, detail=".zarray is missing"))
        return []
    try:
        return [_parse(folder.name, json.loads(metadata.read_bytes()))]
    except (ValueError, KeyError, TypeError) as error:
        detail = f".zarray: {type(error).__name__}: {error}"
        found.findings.append(Finding(damages.BAD_METADATA, folder.name, detail=detail))
        return []


def _parse(name: str, metadata: dict[str, object]) -> Array:
    if metadata["compressor"] is not None or metadata["filters"] or metadata["order"] != "C":
        raise ValueError("expected raw chunks in C order, which is what Megatron writes")
    dtype, item_size = ITEM_SIZE[str(metadata["dtype"])]
    shape, chunks = (tuple(map(int, metadata[key])) for key in ("shape", "chunks"))  # type: ignore[call-overload]
    if len(shape) != len(chunks) or any(n < 0 for n in shape) or any(n < 1 for n in chunks):
        raise ValueError(f"expected chunks {chunks} to divide the shape {shape}")
    return Array(name, dtype, item_size, shape, chunks, str(metadata.get("dimension_separator", ".")))


def _shards(parameter: str, roles: dict[str, Array], found: Checkpoint) -> list[Shard]:
    """The chunks of one parameter's arrays, put together where the arrays are cut alike."""
    shards = []
    for grid in dict.fromkeys((array.shape, array.chunks) for array in roles.values()):
        alike = {role: array for role, array in roles.items() if (array.shape, array.chunks) == grid}
        for label in next(iter(alike.values())).labels():
            chunks = {role: _chunk(array, label, found) for role, array in alike.items()}
            streams, lost = (
                {role: c for role, (c, there) in chunks.items() if there is want} for want in (True, False)
            )
            shards.append(Shard(parameter, label, grid[1], streams, (), lost, not is_bucket(parameter)))
    _check_strays(roles, found)
    return shards


def _chunk(array: Array, label: str, found: Checkpoint) -> tuple[Stream, bool]:
    """One chunk's bytes, and whether they are all there."""
    file = found.path / array.name / label
    stream = Stream(array.name, array.dtype, (Extent(str(file), 0, array.chunk_bytes),))
    try:
        nbytes = file.stat().st_size
    except OSError:
        found.findings.append(_whole_chunk(damages.MISSING_CHUNK, array, label, ""))
        return stream, False
    if nbytes != array.chunk_bytes:
        kind = damages.SHORT_CHUNK if nbytes < array.chunk_bytes else damages.LONG_CHUNK
        found.findings.append(_whole_chunk(kind, array, label, f"{nbytes} bytes of {array.chunk_bytes}"))
    return stream, nbytes >= array.chunk_bytes


def _whole_chunk(kind: damages.Kind, array: Array, label: str, detail: str) -> Finding:
    return Finding(kind, array.name, label, 0, math.prod(array.chunks), detail)


def _check_strays(roles: dict[str, Array], found: Checkpoint) -> None:
    """Chunk files outside of the array's grid."""
    for array in roles.values():
        expected = {".zarray", ".zattrs", *array.labels()}
        strays = sorted({file.name for file in (found.path / array.name).iterdir()} - expected)
        if strays:
            found.findings.append(Finding(damages.STRAY_FILE, array.name, detail=", ".join(strays[:5])))
