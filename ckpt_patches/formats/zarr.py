"""Zarr arrays as Megatron writes them: a folder per array, with `.zarray` and a file of raw bytes per chunk.

The format: Zarr v2 without compression, chunks in C order; see https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html.
"""

import itertools
import json
import math
import os
import re
from pathlib import Path
from typing import Any

from ckpt_patches.formats import damages, tensor_streams
from ckpt_patches.formats.checkpoint import WEIGHT, Checkpoint, Extent
from ckpt_patches.formats.chunked import Chunked, Object
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.dtypes import ITEM_SIZE
from ckpt_patches.formats.megatron_arrays import OF_AN_ARRAY, by_parameter, check_config, is_of_distributed, set_common
from ckpt_patches.formats.megatron_torch import check_weights, judge_contents
from ckpt_patches.formats.paths import LeavesFolderError, path_within
from ckpt_patches.formats.pickles import MOST_DIMENSIONS
from ckpt_patches.formats.ranged import read_metadata
from ckpt_patches.formats.torch_dist import COMMON, Tensor
from ckpt_patches.formats.torch_file import BadFileError, NotReadError
from ckpt_patches.runtime.shown import shown

LARGEST = 1 << 20  # bytes of the metadata
METADATA, ATTRIBUTES = OF_AN_ARRAY, ".zattrs"  # an array's files beside its chunks
COUNTS = re.compile(r"shard_\d{1,9}(?:\.\d{1,9}){0,9}_(\d{1,9}(?:\.\d{1,9}){0,9})\.pt")  # of an object's files
LOCKS = ".sync"  # suffix of the folder with an array's locks
MOST_MISSING = 100_000  # chunks of an array; if more are missing, the shape is wrong
# torch's dtype by zarr's. Dtypes that NumPy lacks have the names of ml_dtypes.
DTYPES = {
    **{f"<f{size}": f"float{8 * size}" for size in (2, 4, 8)},
    **{f"<i{size}": f"int{8 * size}" for size in (2, 4, 8)},
    **{f"<u{size}": f"uint{8 * size}" for size in (2, 4, 8)},
    **{f"<c{size}": f"complex{8 * size}" for size in (8, 16)},
    **{f"float8_{kind}": f"float8_{kind}" for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")},
    "bfloat16": "bfloat16",
    "|i1": "int8",
    "|u1": "uint8",
    "|b1": "bool",
}


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint, with findings for the problems of its files."""
    return read_chunked(path)[0]


def read_chunked(path: Path) -> tuple[Checkpoint, dict[str, Chunked], dict[str, Object]]:
    """The same as `read`, with its arrays, and with those of its objects that can be read."""
    found = Checkpoint(path, "megatron zarr")
    check_config(found)
    if (common := tensor_streams.read(path / COMMON, found, damages.BAD_METADATA)) is not None:
        set_common(found, common, is_distributed=any(map(is_of_distributed, os.listdir(path))))
    arrays: dict[str, Chunked] = {}
    dtypes: dict[str, str] = {}
    objects: dict[str, Object] = {}
    for folder in sorted(path.iterdir()):
        if folder.is_symlink() and not folder.exists():
            found.add(damages.BAD_FILE, folder.name, "a link to what is not there")
        if not folder.is_dir():
            continue
        files = {file.name for file in folder.iterdir()}
        if folder.suffix == LOCKS:
            found.add(damages.LOCK_DIRECTORY, folder.name)
            continue
        # An array without metadata still has its chunks.
        if METADATA in files or any(name[0].isdigit() for name in files):
            array = _array(folder, files, found)
            dtypes[folder.name] = "" if array is None else array.tensor.dtype
            arrays |= {} if array is None else {folder.name: array}
        if METADATA in files:
            continue
        counts = {math.prod(map(int, match[1].split("."))) for match in map(COUNTS.fullmatch, files) if match}
        if not files or any(count != len(files) for count in counts):
            detail = f"{len(files)} files of the object, expected {max(counts, default=1)}"
            found.add(damages.BAD_FILE, folder.name, detail)
        for file in sorted(folder.glob("shard_*.pt")):
            if (read := tensor_streams.read_file(file, found)) is not None:
                objects[f"{folder.name}/{file.stem}"] = Object(Extent(str(file), 0, read.size), read.value)
    numels = judge_contents(found, arrays, objects, dtypes)
    if sum(numel > 0 for numel in numels) == 1:  # there is one model-parallel rank
        weights = [roles[WEIGHT].tensor.chunks for roles in by_parameter(arrays).values() if WEIGHT in roles]
        numels_of_layers = [math.prod(sizes) for chunks in weights for sizes in chunks.values()]  # a chunk for each
        check_weights(found, "the model's weights", sum(numels), numels_of_layers)
    return found, arrays, objects


def read_array(folder: Path) -> Chunked:
    """Read the metadata of an array. Its chunks are where they should be; they are not looked up.

    Raises:
        BadFileError: the metadata is missing or invalid.
        NotReadError: the chunks are not raw bytes in C order, or have an unknown dtype.
    """
    path = folder / METADATA
    try:
        # No file is a link out of the checkpoint, whose content a conversion would copy.
        within = (os.path.join(base, name) for base, folders, files in os.walk(folder) for name in (*folders, *files))
        for link in filter(os.path.islink, (str(folder), *within)):
            path_within(folder.parent, os.path.relpath(link, folder.parent))
        metadata = json.loads(read_metadata(path, LARGEST))
        shape, chunk = (_numbers(metadata[key]) for key in ("shape", "chunks"))
        if len(shape) != len(chunk) or any(n < 0 for n in shape) or any(n < 1 for n in chunk):
            raise ValueError(f"expected chunks {chunk} to divide the shape {shape}")
        dtype, separator = metadata["dtype"], metadata.get("dimension_separator", ".")
        if separator not in (".", "/"):
            raise ValueError(f"expected . or / between the numbers of a chunk, found {shown(separator)}")
        is_raw = metadata["compressor"] is None and not metadata["filters"] and metadata["order"] == "C"
    except LeavesFolderError as error:
        raise NotReadError(str(error)) from None
    except OSError as error:
        raise BadFileError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BadFileError(f"{path} is corrupt: {type(error).__name__}: {error}") from None
    expected = math.prod(-(-size // n) for size, n in zip(shape, chunk, strict=True))
    there = len(os.listdir(folder))
    if expected > MOST_MISSING + there:
        raise BadFileError(f"{path}: {expected} chunks by its shape {list(shape)}, and there are {there} files")
    if not is_raw or not isinstance(dtype, str) or dtype not in DTYPES:
        raise NotReadError(f"{path}: expected raw chunks in C order, of a known type, found elements of {shown(dtype)}")
    nbytes = math.prod(chunk) * ITEM_SIZE[DTYPES[dtype]]  # of a chunk; one at an edge has the full size, too
    extents = {}
    for at in itertools.product(*(range(0, size, n) for size, n in zip(shape, chunk, strict=True))):
        name = separator.join(str(begin // n) for begin, n in zip(at, chunk, strict=True)) or "0"
        extents[at] = Extent(str(folder / name), 0, nbytes)
    return Chunked(Tensor(folder.name, DTYPES[dtype], shape, None, dict.fromkeys(extents, chunk)), extents)


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > MOST_DIMENSIONS or any(type(value) is not int for value in values):
        raise ValueError(f"expected a list of numbers, found {shown(values)}")
    return tuple(values)


def _array(folder: Path, files: set[str], found: Checkpoint) -> Chunked | None:
    """The array of a folder, with findings for its chunks; None, and a finding, if its metadata cannot be read."""
    try:
        array = read_array(folder)
    except (BadFileError, NotReadError) as error:
        found.findings.append(tensor_streams.refused(error, folder.name, damage=damages.BAD_METADATA))
        return None
    labels = {offsets[0]: label for label, offsets in array.shards().items()}
    chunks = {file[len(f"{folder}/") :].partition("/")[0] for file, _, _ in array.extents.values()}
    if strays := sorted(files - chunks - {METADATA, ATTRIBUTES}):
        found.add(damages.STRAY_FILE, folder.name, ", ".join(strays[:5]))
    for at, (file, _, nbytes) in list(array.extents.items()):
        try:
            there = os.stat(file).st_size
        except FileNotFoundError:
            there = None
        kind, detail = damages.LONG_CHUNK, f"{there} bytes of {nbytes}"
        if there is None or there < nbytes:
            array.lost[at] = array.extents.pop(at)
            kind, detail = (damages.MISSING_CHUNK, "") if there is None else (damages.SHORT_CHUNK, detail)
        if there != nbytes:
            numel = math.prod(array.tensor.chunks[at])
            found.findings.append(Finding(kind, folder.name, detail, shard=labels[at], begin=0, end=numel))
    return array
