"""Reader for Megatron's distributed checkpoints in zarr: a chunk is one tensor-parallel rank's shard."""

import math
import os
import re
from pathlib import Path
from typing import Any

from ckpt_patches.formats import damages, tensor_streams
from ckpt_patches.formats.checkpoint import WEIGHT, Checkpoint, Extent, Shard, Stream
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.megatron_arrays import (
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
from ckpt_patches.formats.torch_dist import COMMON
from ckpt_patches.formats.torch_file import BadFileError, NotReadError
from ckpt_patches.formats.zarr import ATTRIBUTES, LOCKS, METADATA, Array, arrays, read_array

SHARD = re.compile(r"shard_(\d{1,9}(?:\.\d{1,9}){0,9})_(\d{1,9}(?:\.\d{1,9}){0,9})\.pt")  # index and number of parts


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
