"""Reader for Megatron's distributed checkpoints in torch_dist. Joins the chunks of each rank's flattened shard."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_patches.errors import UserError
from ckpt_patches.formats import damages, dcp, swiglu_rows, tensor_streams, torch_dist, torch_file
from ckpt_patches.formats.checkpoint import WEIGHT, Checkpoint, Extent, Held, Record, Shard, Stream
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.dtypes import FLOATS
from ckpt_patches.formats.megatron_arrays import (
    by_parameter,
    check_config,
    check_promises,
    check_siblings,
    is_of_distributed,
    name_other_cuts,
    set_common,
)
from ckpt_patches.formats.megatron_names import OPTIMIZER_STATE, is_bucket
from ckpt_patches.formats.megatron_torch import ALIGNMENT, check_bucket_sizes, judge_object
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.formats.torch_dist import Offsets, Tensor
from ckpt_patches.formats.torch_file import BadFileError, NotReadError, TensorHeader, TorchFile
from ckpt_patches.formats.torch_optimizers import OF_ELEMENTS
from ckpt_patches.runtime.processes import mapped

OF_SHARDS = re.compile(r"/shard_[\d.]+_[\d.]+$")  # end of megatron-core's object names
WORTH_A_PROCESS = 4000  # chunks per process
MANY = 1000  # lost chunks of a tensor in one file that are reported one by one
Key = tuple[str, tuple[int, ...]]  # a shard's label and shape


@dataclass(frozen=True)
class Chunked:
    """A tensor, and the place of each chunk's elements."""

    tensor: Tensor
    extents: dict[Offsets, Extent] = field(default_factory=dict)

    def shards(self) -> dict[str, list[Offsets]]:
        """The chunks of each tensor-parallel rank's shard, in the order of their elements, by the shard's label.

        The label is the shard's index in the grid of shards, or its offset if the shards do not form a grid.
        """
        chunks = sorted(self.tensor.chunks)
        if self.tensor.whole is None:
            indices = {offsets: self._index(offsets) for offsets in chunks}
            is_grid = None not in indices.values() and len(set(indices.values())) == len(chunks)
            return {_label(indices[offsets] or () if is_grid else offsets): [offsets] for offsets in chunks}
        found: dict[str, list[Offsets]] = {}
        for offsets in chunks:
            found.setdefault(_label(offsets[:-1]), []).append(offsets)
        return found

    def _index(self, offsets: Offsets) -> Offsets | None:
        """A chunk's index in a grid of chunks of its size; None if it is not on such a grid."""
        sizes = self.tensor.chunks[offsets]
        if any(at % size if size else at for at, size in zip(offsets, sizes, strict=True)):
            return None
        return tuple(at // size if size else 0 for at, size in zip(offsets, sizes, strict=True))

    def gaps(self) -> set[Offsets]:
        """The chunks of a bucket that are gaps between two parameters. `dp_reshardable` saves them.

        A parameter begins at a multiple of 64 elements, or continues at the start of a rank's part.
        """
        found: set[Offsets] = set()
        for before, at in itertools.pairwise(sorted(self.tensor.chunks) if is_bucket(self.tensor.name) else ()):
            begin, length = sum(at), math.prod(self.tensor.chunks[at])
            fills_up = begin % ALIGNMENT > 0 and length < ALIGNMENT and (begin + length) % ALIGNMENT == 0
            if fills_up and self._rank(before) == self._rank(at):
                found.add(at)
        return found

    def _rank(self, offsets: Offsets) -> str:
        """The rank that wrote a chunk, from the file's name."""
        place = self.tensor.places.get(offsets)
        return "" if place is None else place.path.rpartition("_")[0]

    def shape(self, offsets: list[Offsets]) -> tuple[int, ...]:
        """The shape of a shard. If flattened: the tensor's original shape divided by the fragments on each axis."""
        if self.tensor.whole is None:
            return self.tensor.chunks[offsets[0]]
        shape = tuple(n // parts for n, parts in zip(self.tensor.whole, self.tensor.size, strict=False))
        numel = sum(math.prod(self.tensor.chunks[at]) for at in offsets)
        return shape if math.prod(shape) == numel else (numel,)

    def begin(self, offsets: list[Offsets]) -> Offsets:
        """The place of a shard's first element in the tensor; empty if the shard has another shape, and in buckets."""
        if is_bucket(self.tensor.name):
            return ()
        if self.tensor.whole is None:
            return offsets[0]
        shape = self.shape(offsets)
        index = offsets[0][: len(self.tensor.whole)]
        is_in_place = len(shape) == len(index) and offsets[0][len(index) :] in ((), (0,))
        return tuple(at * n for at, n in zip(index, shape, strict=True)) if is_in_place else ()


def _label(index: Offsets) -> str:
    return ".".join(map(str, index))


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint, with findings for the problems of its files."""
    return read_chunked(path)[0]


def read_chunked(path: Path) -> tuple[Checkpoint, dict[str, Chunked], torch_dist.Index]:
    """The same as `read`, with the chunks of each tensor and the index."""
    found = Checkpoint(path, "megatron torch_dist")
    check_config(found)
    known = len(found.findings)
    index = read_index(found, path)
    # Without an index it is not known whether the common state has a file of its own.
    is_expected = len(found.findings) == known or (path / torch_dist.COMMON).exists()
    if is_expected and (common := _common(found, index)) is not None:
        set_common(found, common, is_distributed=_is_distributed(index))
    found.findings += wrong_entries(index)
    found.findings += _rows_of_fsdp2(mixed_rows(found, index))
    tensors = {name: Chunked(tensor) for name, tensor in index.tensors.items()}
    find_elements(tensors, found)
    with RangedFiles() as files:
        objects = {name: _judged_object(name, index, found, files) for name in index.objects}
    check_bucket_sizes(found, {name.partition("/")[0]: value for name, value in objects.items()})
    check_siblings(found, {name: chunked.tensor.dtype for name, chunked in tensors.items()})
    for parameter, roles in by_parameter(tensors).items():
        found.shards += shards_of(found, parameter, _with_shapes(roles))
    check_promises(found, tensors)
    return found, tensors, index


def wrong_entries(index: torch_dist.Index) -> Iterator[Finding]:
    """Report entries of an index without a place in a file, or at the place of another entry."""
    for name in (name for name in index.absent if name != torch_dist.COMMON_OBJECT):  # `_common` reports that one
        detail = "the index lists it, or a rank has planned to write it, and it is in no file"
        yield Finding(damages.MISSING_ARRAY, name, detail)
    for first, other in itertools.islice(index.same_places(), MANY):
        yield Finding(damages.FOREIGN_FILE, other, f"the index has it at the same bytes as {first}")


def mixed_rows(found: Checkpoint, index: torch_dist.Index) -> dict[str, swiglu_rows.Mixed]:
    """Tensors whose rows torch FSDP2 has mixed, by name, including those where this cannot be determined.

    Releases that mix rows write a file of unsharded state. The run's arguments, if known, state whether it used FSDP2.
    """
    if found.torch_fsdp2 is False or not (found.path / torch_dist.COMMON).exists():
        return {}
    return swiglu_rows.mixed(index.tensors, is_fsdp2=bool(found.torch_fsdp2))


def _rows_of_fsdp2(mixed: dict[str, swiglu_rows.Mixed]) -> Iterator[Finding]:
    for name, (grid, why_not) in mixed.items():
        if grid is None:
            detail = f"whether rows of W and V are in each other's places, as torch FSDP2 has saved them: {why_not}"
            yield Finding(damages.NOT_JUDGED, name, detail)
        else:
            ranks = f"{grid.tensor_parallel} tensor-parallel and {grid.data_parallel} data-parallel ranks"
            yield Finding(damages.MIXED_ROWS, name, f"saved by {ranks}")


def _is_distributed(index: torch_dist.Index) -> bool:
    """Whether a distributed optimizer saved the checkpoint. Others do not flatten their states."""
    flattened = (name for name, tensor in index.tensors.items() if tensor.whole is not None)
    return any(map(is_of_distributed, (*index.tensors, *index.objects))) or any(OPTIMIZER_STATE in n for n in flattened)


def _with_shapes(roles: dict[str, Chunked]) -> dict[str, Chunked]:
    """A parameter's arrays, the flattened ones with their original shape.

    Up to megatron-core 0.8 the index does not store that shape, so it is taken from the model's weight.
    """
    weight = roles.get(WEIGHT)
    if weight is None:
        return roles
    size = weight.tensor.size
    return {
        role: replace(chunked, tensor=replace(chunked.tensor, whole=size))
        if chunked.tensor.whole is None
        and len(chunked.tensor.size) == len(size) + 1
        and math.prod(chunked.tensor.size) == math.prod(size)
        else chunked
        for role, chunked in roles.items()
    }


def _common(found: Checkpoint, index: torch_dist.Index) -> Any:
    """The unsharded state; None, and a finding, if unreadable. If it is an object, `_judged_object` registers it."""
    path = found.path / torch_dist.COMMON
    if path.exists() or torch_dist.COMMON_OBJECT not in index.objects:
        return tensor_streams.read(path, found, damages.BAD_METADATA)
    try:
        return torch_dist.read_common(found.path, index)
    except (BadFileError, NotReadError) as error:
        found.findings.append(tensor_streams.refused(error, torch_dist.COMMON, damage=damages.BAD_METADATA))
        return None


def read_index(found: Checkpoint, folder: Path) -> torch_dist.Index:
    """The index in a folder of the checkpoint; an empty one, and a finding, if it cannot be read."""
    try:
        return torch_dist.read_index(folder)
    except UserError as error:
        where = str((folder / torch_dist.INDEX).relative_to(found.path))
        found.findings.append(tensor_streams.refused(error, where, damage=damages.BAD_METADATA))
        return torch_dist.Index({}, {})


class _Elements(NamedTuple):
    """The place of a chunk's elements, with their checksums."""

    extent: Extent | None  # None if they are not contiguous
    records: tuple[Record, ...]
    held: tuple[Held, ...]  # several of a subclass of tensors


def find_elements(tensors: dict[str, Chunked], found: Checkpoint) -> None:
    """Find the place and the checksum of each chunk's elements. Several processes share the work for many chunks."""
    read = [own for own in tensors.values() if tensor_streams.is_read(found, own.tensor.name, own.tensor.dtype)]
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
        else:
            found.records += elements.records
            if elements.extent is not None:
                own.extents[offsets] = elements.extent
            else:
                found.tensors += elements.held
                if len(elements.held) > 1:
                    found.add(damages.CODED_STATE, own.tensor.name, shard=str(offsets))
                elif not _is_alone(own.tensor.name):
                    detail = "its elements do not lie in the order of its shape: they were not compared with others"
                    found.add(damages.NOT_JUDGED, own.tensor.name, detail, shard=str(offsets))


def _is_alone(name: str) -> bool:
    """Whether a tensor is a state that is compared with no other, such as a factor of Shampoo or SOAP."""
    return f".{dcp.STATE}" in f".{name}" and name.rpartition(".")[2] not in OF_ELEMENTS


def _lost(tensors: list[Chunked], found: Checkpoint) -> set[tuple[str, str]]:
    """Tensors, with a file, that have many chunks beyond the end of that file. Adds one finding for all of these."""
    counts: Counter[tuple[str, str]] = Counter()
    ends: dict[str, int] = {}
    for own in tensors:
        for file, offset, nbytes in own.tensor.places.values():
            if file not in ends:
                ends[file] = _size(found.path / file)
            if offset + nbytes > ends[file]:
                counts[own.tensor.name, file] += 1
    many = {key: count for key, count in counts.items() if count > MANY}
    for (name, file), count in many.items():
        found.add(damages.BAD_FILE, name, f"{count} chunks are beyond the end of {file}, at its byte {ends[file]}")
    return set(many)


def _size(path: Path) -> int:
    """The size of a file; 0 if it is missing."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _elements(chunk: tuple[Chunked, Offsets], path: Path, files: RangedFiles) -> _Elements | Finding:
    """The elements of one chunk, or a finding if it cannot be read."""
    tensor, offsets = chunk[0].tensor, chunk[1]
    if offsets not in tensor.places:
        return Finding(damages.MISSING_CHUNK, tensor.name, "not in the index", shard=str(offsets))
    try:
        part = torch_dist.read_chunk(files, path, tensor, offsets)
    except torch_dist.NotContiguousError as error:
        part = error.file
    except torch_dist.SubclassError as error:
        return _coded(error.file, tensor, offsets) or tensor_streams.refused(error, tensor.name, str(offsets))
    except (BadFileError, NotReadError) as error:
        return tensor_streams.refused(error, tensor.name, str(offsets))
    span, name, header = tensor.places[offsets][1:], str(part.path), part.value
    records = tuple(Record(name, *stored, span) for stored in part.storages)
    extent = Extent(name, header.offset, header.nbytes) if header.is_contiguous else None
    return _Elements(extent, records, (Held(name, tensor.name, header),))


def _coded(part: TorchFile, tensor: Tensor, offsets: Offsets) -> _Elements | None:
    """The tensors of a subclass, as codes and scales of 8 bits; None if it has no scales beside other numbers."""
    inner = [(name, own) for name, own in torch_file.parts_of(part.value, tensor.name) if isinstance(own, TensorHeader)]
    if not {own.dtype in FLOATS for _, own in inner} >= {True, False}:
        return None
    span, path = tensor.places[offsets][1:], str(part.path)
    records = tuple(Record(path, *stored, span) for stored in part.storages)
    return _Elements(None, records, tuple(Held(path, name, own) for name, own in inner))


def read_object(name: str, index: torch_dist.Index, found: Checkpoint, files: RangedFiles) -> TorchFile | None:
    """An object, whose tensors are registered; None, and a finding, if it cannot be read."""
    place = index.objects[name]
    try:
        part = torch_dist.read_place(files, found.path, place)
    except (BadFileError, NotReadError) as error:
        found.findings.append(tensor_streams.refused(error, name))
        return None
    tensor_streams.hold(found, part, place[1:], name)
    return part


def _judged_object(name: str, index: torch_dist.Index, found: Checkpoint, files: RangedFiles) -> Any:
    """The value of an object; None if it cannot be read. `dp_zero_gather_scatter` saves states as objects."""
    part = read_object(name, index, found, files)
    if part is None:
        return None
    if OF_SHARDS.search(name) and isinstance(part.value, list) and len(part.value) != 1:
        found.add(damages.BAD_FILE, name, f"expected a list of one, found {len(part.value)}")
    if name != torch_dist.COMMON_OBJECT:
        judge_object(found, part, name)
    return part.value


def shards_of(found: Checkpoint, parameter: str, roles: dict[str, Chunked]) -> list[Shard]:
    """The shards of a parameter. Parts of its arrays with the same label and shape are streams of one shard."""
    if not any(chunked.extents for chunked in roles.values()):
        return []
    alike: dict[Key, dict[str, Stream]] = {}
    paddings: set[Key] = set()
    begins: dict[Key, Offsets] = {}
    cut = _cut(roles)
    name_other_cuts(found, {role: (chunked.tensor.name, frozenset(cut[role])) for role, chunked in roles.items()})
    for role, chunked in roles.items():
        gaps = chunked.gaps()
        for key, offsets in cut[role].items():
            if all(at in chunked.extents for at in offsets):
                extents = tuple(chunked.extents[at] for at in offsets)
                alike.setdefault(key, {})[role] = Stream(chunked.tensor.name, chunked.tensor.dtype, extents)
                paddings |= {key} if gaps & set(offsets) else set()
                begins[key] = chunked.begin(offsets)
    has_rows = not is_bucket(parameter)
    return [
        Shard(*(parameter, *key, streams), has_rows=has_rows, is_padding=key in paddings, begin=begins[key])
        for key, streams in alike.items()
    ]


def _cut(roles: dict[str, Chunked]) -> dict[str, dict[Key, list[Offsets]]]:
    """The chunks of each shard, by role. 1-D arrays that are sharded differently become one shard each."""
    cut = {role: _keys(chunked) for role, chunked in roles.items()}
    tensors = [chunked.tensor for chunked in roles.values()]
    if len(set(map(frozenset, cut.values()))) > 1 and {len(tensor.size) for tensor in tensors} == {1}:
        return {role: {("", chunked.tensor.size): sorted(chunked.tensor.chunks)} for role, chunked in roles.items()}
    return cut


def _keys(chunked: Chunked) -> dict[Key, list[Offsets]]:
    """The chunks of each shard, by label and shape."""
    return {(label, chunked.shape(offsets)): offsets for label, offsets in chunked.shards().items()}
