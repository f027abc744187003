"""Reader for Megatron's distributed checkpoints in torch_dist, and what it shares with torch's own in `dcp_reader`."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_patches.errors import UserError
from ckpt_patches.formats import damages, dcp, swiglu_rows, tensor_streams, torch_dist, torch_file
from ckpt_patches.formats.checkpoint import WEIGHT, Checkpoint, Extent, Held, Record
from ckpt_patches.formats.chunked import Chunked, Object, shards_of
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.dtypes import FLOATS
from ckpt_patches.formats.megatron_arrays import (
    by_parameter,
    check_config,
    check_promises,
    check_siblings,
    is_of_distributed,
    set_common,
)
from ckpt_patches.formats.megatron_names import OPTIMIZER_STATE
from ckpt_patches.formats.megatron_torch import judge_objects
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.formats.recorded import KEY
from ckpt_patches.formats.torch_dist import COMMON, COMMON_OBJECT, Offsets
from ckpt_patches.formats.torch_file import BadFileError, NotReadError, TensorHeader
from ckpt_patches.formats.torch_optimizers import OF_ELEMENTS
from ckpt_patches.runtime.processes import mapped
from ckpt_patches.runtime.shown import shown

OF_SHARDS = re.compile(r"/shard_[\d.]+_[\d.]+$")  # end of megatron-core's object names
WORTH_A_PROCESS = 4000  # chunks per process
MANY = 1000  # lost chunks of a tensor in one file, or entries at the place of others, that are reported one by one


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint, with findings for the problems of its files."""
    return read_chunked(path)[0]


def read_chunked(path: Path) -> tuple[Checkpoint, dict[str, Chunked], dict[str, Object]]:
    """The same as `read`, with its arrays and objects."""
    found = Checkpoint(path, "megatron torch_dist")
    check_config(found)
    known = len(found.findings)
    index = read_index(found, path)
    # Without an index it is not known whether the common state has a file of its own.
    is_expected = len(found.findings) == known or (path / COMMON).exists()
    arrays, objects = read_contents(found, index)
    if is_expected and (common := _common(found, objects)) is not None:
        set_common(found, common, is_distributed=_is_distributed(index))
        found.recorded = common.get(KEY) if isinstance(common, dict) else None
    if (path / COMMON).exists():  # releases that mix rows write it
        found.findings += swiglu_rows.findings(index.tensors, found.torch_fsdp2)
    for name, own in objects.items():
        if OF_SHARDS.search(name) and isinstance(own.value, list) and len(own.value) != 1:
            found.add(damages.BAD_FILE, name, f"expected a list of one, found {len(own.value)}")
    judge_objects(found, {name: own for name, own in objects.items() if name != COMMON_OBJECT})
    check_siblings(found, {name: array.tensor.dtype for name, array in arrays.items()})
    for parameter, roles in by_parameter(arrays).items():
        found.shards += shards_of(found, parameter, _with_shapes(roles))
    check_promises(found, arrays)
    return found, arrays, objects


def _with_shapes(roles: dict[str, Chunked]) -> dict[str, Chunked]:
    """A parameter's arrays, the flattened ones with their original shape.

    Up to megatron-core 0.8 the index does not store that shape, so it is taken from the model's weight.
    """
    weight = roles.get(WEIGHT)
    if weight is None:
        return roles
    size = weight.tensor.size
    return {
        role: replace(array, tensor=replace(array.tensor, whole=size))
        if array.tensor.whole is None
        and len(array.tensor.size) == len(size) + 1
        and math.prod(array.tensor.size) == math.prod(size)
        else array
        for role, array in roles.items()
    }


def read_index(found: Checkpoint, folder: Path) -> torch_dist.Index:
    """The index in a folder of the checkpoint; an empty one, and a finding, if it cannot be read."""
    try:
        return torch_dist.read_index(folder)
    except UserError as error:
        where = str((folder / torch_dist.INDEX).relative_to(found.path))
        found.findings.append(tensor_streams.refused(error, where, damage=damages.BAD_METADATA))
        return torch_dist.Index({}, {})


def read_contents(found: Checkpoint, index: torch_dist.Index) -> tuple[dict[str, Chunked], dict[str, Object]]:
    """The arrays of an index, with the places of their elements, and its objects. Reports what cannot be read."""
    found.findings += _wrong_entries(index)
    arrays = {name: Chunked(tensor) for name, tensor in index.tensors.items()}
    _find_elements(arrays, found)
    objects: dict[str, Object] = {}
    with RangedFiles() as files:
        for name, place in index.objects.items():
            value = None
            try:
                part = torch_dist.read_place(files, found.path, place)
            except (BadFileError, NotReadError) as error:
                found.findings.append(tensor_streams.refused(error, name))
            else:
                tensor_streams.hold(found, part, place[1:], name)
                value = part.value
            objects[name] = Object(place._replace(path=str(found.path / place.path)), value)
    return arrays, objects


def _wrong_entries(index: torch_dist.Index) -> Iterator[Finding]:
    """Report entries of an index without a place in a file, or at the place of another entry."""
    for name in (name for name in index.absent if name != COMMON_OBJECT):  # `_common` reports that one
        detail = "the index lists it, or a rank has planned to write it, and it is in no file"
        yield Finding(damages.MISSING_ARRAY, name, detail)
    for first, other in itertools.islice(index.same_places(), MANY):
        yield Finding(damages.FOREIGN_FILE, other, f"the index has it at the same bytes as {first}")


def _is_distributed(index: torch_dist.Index) -> bool:
    """Whether a distributed optimizer saved the checkpoint. Others do not flatten their states."""
    flattened = (name for name, tensor in index.tensors.items() if tensor.whole is not None)
    return any(map(is_of_distributed, (*index.tensors, *index.objects))) or any(OPTIMIZER_STATE in n for n in flattened)


def _common(found: Checkpoint, objects: dict[str, Object]) -> Any:
    """The unsharded state, from its file, or from its object if there is none; None, and a finding, if unreadable."""
    if (found.path / COMMON).exists() or COMMON_OBJECT not in objects:
        return tensor_streams.read(found.path / COMMON, found, damages.BAD_METADATA)
    value = objects[COMMON_OBJECT].value
    if isinstance(value, list) and len(value) == 1:
        return value[0]
    found.add(damages.BAD_METADATA, COMMON, f"expected a list of one as {COMMON_OBJECT}, found {shown(value)}")
    return None


class _Elements(NamedTuple):
    """The place of a chunk's elements, with their checksums."""

    extent: Extent | None  # None if they are not contiguous
    records: tuple[Record, ...]
    held: tuple[Held, ...]  # several of a subclass of tensors


def _find_elements(arrays: dict[str, Chunked], found: Checkpoint) -> None:
    """Find the place and the checksum of each chunk's elements. Several processes share the work for many chunks."""
    read = [own for own in arrays.values() if tensor_streams.is_read(found, own.tensor.name, own.tensor.dtype)]
    lost = _lost(read, found)
    chunks = [
        (own, offsets)
        for own in read
        for offsets in own.tensor.chunks
        if not (lost and (place := own.tensor.places.get(offsets)) and (own.tensor.name, place.path) in lost)
    ]
    with RangedFiles() as files:
        every = mapped(partial(_elements, path=found.path, files=files), chunks, WORTH_A_PROCESS)
    for (own, offsets), elements in zip(chunks, every, strict=True):
        if isinstance(elements, Finding):
            found.findings.append(elements)
            continue
        found.records += elements.records
        if elements.extent is not None:
            own.extents[offsets] = elements.extent
            continue
        found.tensors += elements.held
        if len(elements.held) > 1:
            found.add(damages.CODED_STATE, own.tensor.name, shard=str(offsets))
        elif not _is_alone(own.tensor.name):
            detail = "its elements do not lie in the order of its shape: they were not compared with others"
            found.add(damages.NOT_JUDGED, own.tensor.name, detail, shard=str(offsets))


def _is_alone(name: str) -> bool:
    """Whether a tensor is a state that is compared with no other, such as a factor of Shampoo or SOAP."""
    return f".{dcp.STATE}" in f".{name}" and name.rpartition(".")[2] not in OF_ELEMENTS


def _lost(arrays: list[Chunked], found: Checkpoint) -> set[tuple[str, str]]:
    """Tensors, with a file, that have many chunks beyond the end of that file. Adds one finding for all of these."""
    counts: Counter[tuple[str, str]] = Counter()
    ends: dict[str, int] = {}
    for own in arrays:
        for file, offset, nbytes in own.tensor.places.values():
            if file not in ends:
                ends[file] = _size(found.path / file)
            if offset + nbytes > ends[file]:
                counts[own.tensor.name, file] += 1
    many = {key for key, count in counts.items() if count > MANY}
    for name, file in many:
        detail = f"{counts[name, file]} chunks are beyond the end of {file}, at its byte {ends[file]}"
        found.add(damages.BAD_FILE, name, detail)
    return many


def _size(path: Path) -> int:
    """The size of a file; 0 if it is not there, or cannot be under this name."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _elements(chunk: tuple[Chunked, Offsets], path: Path, files: RangedFiles) -> _Elements | Finding:
    """The elements of one chunk, or a finding if it cannot be read."""
    tensor, offsets = chunk[0].tensor, chunk[1]
    if offsets not in tensor.places:
        return Finding(damages.MISSING_CHUNK, tensor.name, "not in the index", shard=str(offsets))
    held: list[Held] = []
    try:
        part = torch_dist.read_chunk(files, path, tensor, offsets)
    except torch_dist.ChunkError as error:
        part, file = error.file, str(error.file.path)
        if isinstance(part.value, TensorHeader):
            held = [Held(file, tensor.name, part.value)]
        else:  # a subclass of tensors is one of 8 bits if it has scales beside other numbers, its codes
            inner = torch_file.parts_of(part.value, tensor.name)
            held = [Held(file, name, own) for name, own in inner if isinstance(own, TensorHeader)]
            if not {own.header.dtype in FLOATS for own in held} >= {True, False}:
                return tensor_streams.refused(error, tensor.name, str(offsets))
    except (BadFileError, NotReadError) as error:
        return tensor_streams.refused(error, tensor.name, str(offsets))
    records = tuple(Record(str(part.path), *stored, tensor.places[offsets][1:]) for stored in part.storages)
    extent = None if held else Extent(str(part.path), part.value.offset, part.value.nbytes)
    return _Elements(extent, records, tuple(held))
