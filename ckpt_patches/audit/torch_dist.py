"""Megatron's distributed checkpoints in torch_dist: each tensor's chunks, put together where a rank has cut it."""

import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_patches.audit import damages, torch_files
from ckpt_patches.audit.checkpoint import Checkpoint, Extent, Owner, Record, Shard, Stream
from ckpt_patches.audit.damages import Finding
from ckpt_patches.audit.megatron import by_parameter, check_siblings, is_bucket, set_common
from ckpt_patches.audit.megatron_torch import judge_object
from ckpt_patches.errors import UserError
from ckpt_patches.formats import torch_dist
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.formats.torch_dist import Offsets, Tensor
from ckpt_patches.formats.torch_file import BadFileError, NotReadError


@dataclass(frozen=True)
class Chunked:
    """A tensor, and where the elements of its chunks lie."""

    tensor: Tensor
    extents: dict[Offsets, Extent] = field(default_factory=dict)

    def shards(self) -> dict[str, list[Offsets]]:
        """The chunks of each tensor-parallel rank's shard, in the order of their elements, by the shard's index."""
        found: dict[str, list[Offsets]] = {}
        for offsets in sorted(self.tensor.chunks):
            index = offsets[:-1] if self.tensor.whole is not None else self._index(offsets)
            found.setdefault(".".join(map(str, index)), []).append(offsets)
        return found

    def _index(self, offsets: Offsets) -> tuple[int, ...]:
        return tuple(at // size if size else 0 for at, size in zip(offsets, self.tensor.chunks[offsets], strict=True))

    def shape(self, offsets: list[Offsets]) -> tuple[int, ...]:
        """Of a shard; a flattened one's is the whole's by the number of fragments on each axis."""
        if self.tensor.whole is None:
            return self.tensor.chunks[offsets[0]]
        shape = tuple(n // parts for n, parts in zip(self.tensor.whole, self.tensor.size, strict=False))
        numel = sum(math.prod(self.tensor.chunks[at]) for at in offsets)
        return shape if math.prod(shape) == numel else (numel,)


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint; what is wrong with its files is among the findings."""
    found = Checkpoint(path, "megatron torch_dist")
    index = _index(found)
    try:
        set_common(found, torch_dist.read_common(path, index))
    except (BadFileError, NotReadError) as error:
        found.findings.append(torch_files.refused(error, torch_dist.COMMON, damage=damages.BAD_METADATA))
    tensors = {name: Chunked(tensor) for name, tensor in index.tensors.items()}
    with RangedFiles() as files:
        for chunked in tensors.values():
            _find_elements(chunked, found, files)
        for name in index.objects:
            _read_object(name, index, found, files)
    check_siblings(found, tensors)
    for parameter, roles in by_parameter(tensors).items():
        found.shards += _shards(parameter, roles)
    return found


def _index(found: Checkpoint) -> torch_dist.Index:
    """What the index lists; nothing, and a finding, if it cannot be read."""
    try:
        return torch_dist.read_index(found.path)
    except UserError as error:
        found.findings.append(torch_files.refused(error, torch_dist.INDEX, damage=damages.BAD_METADATA))
        return torch_dist.Index({}, {})


def _find_elements(chunked: Chunked, found: Checkpoint, files: RangedFiles) -> None:
    """Of each chunk the place of its elements in the file, with their checksum."""
    tensor = chunked.tensor
    if not torch_files.is_read(found, tensor.name, tensor.dtype):
        return
    for offsets in tensor.chunks:
        if offsets not in tensor.places:
            finding = Finding(damages.MISSING_CHUNK, tensor.name, str(offsets), detail="not in the index")
            found.findings.append(finding)
            continue
        try:
            part = torch_dist.read_chunk(files, found.path, tensor, offsets)
        except (BadFileError, NotReadError) as error:
            found.findings.append(torch_files.refused(error, tensor.name, str(offsets)))
            continue
        span = tensor.places[offsets][1:]
        found.records += [Record(str(part.path), *stored, span) for stored in part.storages]
        chunked.extents[offsets] = Extent(str(part.path), part.value.offset, part.value.nbytes)


def _read_object(name: str, index: torch_dist.Index, found: Checkpoint, files: RangedFiles) -> None:
    """What is no tensor of its own; with `dp_zero_gather_scatter` the optimizer's state is such an object."""
    place = index.objects[name]
    try:
        part = torch_dist.read_place(files, found.path, place)
    except (BadFileError, NotReadError) as error:
        found.findings.append(torch_files.refused(error, name))
        return
    torch_files.hold(found, part, place[1:], name)
    if name != torch_dist.COMMON_OBJECT:
        judge_object(found, part, name)


def _shards(parameter: str, roles: dict[str, Chunked]) -> list[Shard]:
    """The arrays of a parameter by shard, those together that have the same number of elements."""
    alike: dict[tuple[str, tuple[int, ...]], dict[str, Stream]] = {}
    owners: dict[tuple[str, tuple[int, ...]], tuple[Owner, ...]] = {}
    for role, chunked in roles.items():
        for label, offsets in chunked.shards().items():
            if all(at in chunked.extents for at in offsets):
                key = label, chunked.shape(offsets)
                extents = tuple(chunked.extents[at] for at in offsets)
                alike.setdefault(key, {})[role] = Stream(chunked.tensor.name, chunked.tensor.dtype, extents)
                if len(offsets) > 1:
                    owners[key] = _owners(chunked.tensor, offsets)
    return [
        Shard(parameter, label, shape, streams, owners.get((label, shape), ()), has_rows=not is_bucket(parameter))
        for (label, shape), streams in alike.items()
    ]


def _owners(tensor: Tensor, offsets: list[Offsets]) -> tuple[Owner, ...]:
    """Which rank's file has which elements."""
    sizes = [math.prod(tensor.chunks[at]) for at in offsets]
    ends = list(itertools.accumulate(sizes))
    return tuple(
        Owner(tensor.places[at].file, end - size, end) for at, size, end in zip(offsets, sizes, ends, strict=True)
    )
