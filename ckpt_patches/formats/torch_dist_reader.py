"""Reader for Megatron's distributed checkpoints in torch_dist, and what it shares with torch's own in `dcp_reader`."""

import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ckpt_patches.errors import UserError
from ckpt_patches.formats import damages, dcp, swiglu_rows, tensor_streams, torch_dist, torch_file
from ckpt_patches.formats.checkpoint import Checkpoint, Extent, Held, Record
from ckpt_patches.formats.chunked import TOO_MANY, Chunked, Object
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.dtypes import FLOATS
from ckpt_patches.formats.megatron_arrays import check_config, is_of_distributed, set_common
from ckpt_patches.formats.megatron_names import OPTIMIZER_STATE
from ckpt_patches.formats.megatron_torch import judge_contents
from ckpt_patches.formats.pickles import Instance
from ckpt_patches.formats.ranged import RangedFiles, open_regular
from ckpt_patches.formats.torch_dist import COMMON, COMMON_OBJECT, Offsets
from ckpt_patches.formats.torch_file import BadFileError, NotReadError, TensorHeader
from ckpt_patches.formats.torch_optimizers import OF_ELEMENTS
from ckpt_patches.runtime.processes import mapped
from ckpt_patches.runtime.shown import shown

OF_SHARDS = re.compile(r"/shard_[\d.]+_[\d.]+$")  # end of megatron-core's object names
WORTH_A_PROCESS = 4000  # chunks per process
# A chunk's elements; checksums; tensors that are there instead, several of a subclass; a problem.
_Read = tuple[Extent | None, Sequence[Record], Sequence[Held], Finding | None]
MANY = 1000  # entries at the place of others that are reported


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint, with findings for the problems of its files."""
    return read_chunked(path)[0]


def read_chunked(path: Path) -> tuple[Checkpoint, dict[str, Chunked], dict[str, Object]]:
    """The same as `read`, with its arrays and objects."""
    found = Checkpoint(path, "megatron torch_dist")
    check_config(found)
    known = len(found.findings)
    index = read_index(found, path)
    has_index, has_file = len(found.findings) == known, (path / COMMON).exists()
    arrays, objects = read_contents(found, index)
    # Without an index it is not known whether the common state has a file of its own.
    if (has_index or has_file) and (common := _common(found, objects)) is not None:
        # Only a distributed optimizer flattens its states.
        states = [name for name, own in index.tensors.items() if own.whole is not None and OPTIMIZER_STATE in name]
        is_distributed = bool(states) or any(map(is_of_distributed, (*index.tensors, *index.objects)))
        set_common(found, common, is_distributed=is_distributed)
    if has_file:  # releases that mix rows write it
        found.findings += swiglu_rows.findings(index.tensors, found.torch_fsdp2)
    for name, own in objects.items():
        if OF_SHARDS.search(name) and isinstance(own.value, list) and len(own.value) != 1:
            found.add(damages.BAD_FILE, name, f"expected a list of one, found {len(own.value)}")
    contents = {name: own for name, own in objects.items() if name != COMMON_OBJECT}
    judge_contents(found, arrays, contents, {name: array.tensor.dtype for name, array in arrays.items()})
    return found, arrays, objects


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
    for name in (name for name in index.absent if name != COMMON_OBJECT):  # `_common` reports that one
        found.add(
            damages.MISSING_ARRAY, name, "the index lists it, or a rank has planned to write it, and it is in no file"
        )
    for first, other in index.same_places[:MANY]:
        found.add(damages.FOREIGN_FILE, other, f"the index has it at the same bytes as {first}")
    arrays = {name: Chunked(tensor) for name, tensor in index.tensors.items()}
    for name, array in arrays.items():
        if why := array.untiled():
            found.add(damages.NOT_JUDGED if why == TOO_MANY else damages.FRAGMENTS, name, why)
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


def _common(found: Checkpoint, objects: dict[str, Object]) -> Any:
    """The unsharded state, from its file, or from its object if there is none; None, and a finding, if unreadable."""
    if (found.path / COMMON).exists() or COMMON_OBJECT not in objects:
        return tensor_streams.read(found.path / COMMON, found, damages.BAD_METADATA)
    value = objects[COMMON_OBJECT].value
    if isinstance(value, list) and len(value) == 1:
        return value[0]
    found.add(damages.BAD_METADATA, COMMON, f"expected a list of one as {COMMON_OBJECT}, found {shown(value)}")
    return None


def _find_elements(arrays: dict[str, Chunked], found: Checkpoint) -> None:
    """Find the place and the checksum of each chunk's elements. Several processes share the work for many chunks."""
    read = [own for own in arrays.values() if tensor_streams.is_read(found, own.tensor.name, own.tensor.dtype)]
    sizes: dict[str, int | str] = {}
    beyond = {own.tensor.name: _beyond(own, found, sizes) for own in read}
    chunks = [(own, at) for own in read for at in own.tensor.chunks if at not in beyond[own.tensor.name]]
    with RangedFiles() as files:
        every = mapped(partial(_elements, path=found.path, files=files), chunks, WORTH_A_PROCESS)
    for (own, offsets), (extent, records, held, finding) in zip(chunks, every, strict=True):
        found.records += records
        found.tensors += held
        found.findings += filter(None, [finding])
        if extent is not None:
            own.extents[offsets] = extent


def _beyond(array: Chunked, found: Checkpoint, sizes: dict[str, int | str]) -> set[Offsets]:
    """The chunks beyond the end of their file. Adds a finding for each file.

    `sizes` has the files that are known, with the reason if there is no size.
    """
    beyond: dict[str, set[Offsets]] = {}
    for offsets, (file, offset, nbytes) in array.tensor.places.items():
        if file not in sizes:
            try:
                with open(open_regular(found.path / file), "rb") as opened:
                    sizes[file] = os.fstat(opened.fileno()).st_size
            except OSError as error:  # it is not there, or cannot be under this name
                sizes[file] = f"{found.path / file}: {error.strerror or error}"
        size = sizes[file]
        if isinstance(size, str) or offset + nbytes > size:
            beyond.setdefault(file, set()).add(offsets)
    for file, own in beyond.items():
        size = sizes[file]
        detail = f"{len(own)} chunks are beyond the end of {file}, at its byte {size}"
        found.add(damages.BAD_FILE, array.tensor.name, size if isinstance(size, str) else detail)
    return set().union(*beyond.values())


def _elements(chunk: tuple[Chunked, Offsets], path: Path, files: RangedFiles) -> _Read:
    """The place of a chunk's elements, in the order of its shape, or a finding; with checksums."""
    tensor, offsets = chunk[0].tensor, chunk[1]
    name, label, place = tensor.name, str(offsets), tensor.places.get(offsets)
    if place is None:
        return None, (), (), Finding(damages.MISSING_CHUNK, name, "not in the index", shard=label)
    try:
        part = torch_dist.read_place(files, path, place)
    except (BadFileError, NotReadError) as error:
        return None, (), (), tensor_streams.refused(error, name, label)
    file, value = str(part.path), part.value
    records = [Record(file, *stored, place[1:]) for stored in part.storages]
    if isinstance(value, TensorHeader) and (value.dtype, value.shape) == (tensor.dtype, tensor.chunks[offsets]):
        if value.is_contiguous:
            return Extent(file, value.offset, value.nbytes), records, (), None
        # Such as a convolution's weight in `channels_last`. A factor of Shampoo or SOAP is compared with no other.
        detail = f"its elements do not lie in the order of its shape: strides {value.stride}; they were not compared"
        is_alone = f".{dcp.STATE}." in f".{name}" and name.rpartition(".")[2] not in OF_ELEMENTS
        finding = None if is_alone else Finding(damages.NOT_JUDGED, name, detail, shard=label)
        return None, records, [Held(file, name, value)], finding
    if isinstance(value, Instance):  # a subclass of tensors: one of 8 bits has scales beside other numbers, its codes
        parts = torch_file.parts_of(value, name)
        held = [Held(file, inner, own) for inner, own in parts if isinstance(own, TensorHeader)]
        if {own.header.dtype in FLOATS for own in held} >= {True, False}:
            return None, records, held, Finding(damages.CODED_STATE, name, shard=label)
    what = f"{value.dtype} {list(value.shape)}" if isinstance(value, TensorHeader) else type(value).__name__
    expected = f"{tensor.dtype} {list(tensor.chunks[offsets])} at its byte {place.offset}"
    kind = damages.NOT_READ if isinstance(value, Instance) else damages.BAD_FILE
    return None, (), (), Finding(kind, name, f"{part.path}: expected {expected}, found {what}", shard=label)
