"""Plan a complete migration before any byte is written. Pure."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_patches.audit.judging.record_checksums import rest
from ckpt_patches.errors import UserError
from ckpt_patches.formats.checkpoint import Extent, Record, Shard
from ckpt_patches.formats.dtypes import nbytes
from ckpt_patches.formats.torch_dist import Offsets
from ckpt_patches.migrate import chunk_cover, entry_layout, keys, settings, swiglu_parts
from ckpt_patches.migrate.chunk_cover import Part
from ckpt_patches.migrate.entry_layout import Raw, Torch
from ckpt_patches.migrate.keys import BUCKETS, GATHERED, MODEL_SPACE, TARGETS
from ckpt_patches.migrate.old_checkpoint import Array, Object, Shape, Source

ALIGNMENT = 64  # elements; parameters begin at multiples of it in the buffers of 0.8 and later
FILE = 256 << 20  # minimum bytes of each output file but the last: large enough to be read quickly


@dataclass(frozen=True)
class Item:
    """An entry of the new index."""

    key: str
    content: Torch | Raw
    offsets: Offsets | None = None  # of a tensor's chunk; None for an object
    shape: Shape = ()  # of the chunk

    @property
    def extents(self) -> tuple[Extent, ...]:
        """All source ranges that it needs."""
        return tuple(extent for own in self.content.sources for extent in own)


@dataclass(frozen=True)
class OutputFile:
    """An output file: its items, one after another."""

    name: str
    items: tuple[Item, ...]
    shards: tuple[int, ...]  # numbers of the shards that are read for it

    @property
    def nbytes(self) -> int:
        return sum(item.content.nbytes for item in self.items)


@dataclass(frozen=True)
class Row:
    """A row of the plan's table: what some keys of the source become."""

    what: str
    source: str  # pattern of their names
    target: str
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class Tensor:
    """A tensor of the new checkpoint."""

    name: str
    dtype: str
    size: Shape


@dataclass(frozen=True)
class Plan:
    """The plan of a migration."""

    source_type: str  # Megatron's sharding type of the optimizer state; empty if not distributed
    target_type: str
    shards: tuple[Shard, ...]  # to read and judge, each byte once
    tensors: tuple[Tensor, ...]
    files: tuple[OutputFile, ...]
    settings: Any  # the new unsharded state
    rows: tuple[Row, ...]
    warnings: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """The total size of the files."""
        return sum(file.nbytes for file in self.files)


def source_type(source: Source) -> str:
    """The sharding type of the source's optimizer state; empty if the state is missing or not distributed.

    Raises:
        UserError: it has several types.
    """
    found = settings.sharding_types(source.settings)
    if len(found) > 1:
        raise UserError(f"{source.found.path}: expected one sharding type of the optimizer, found {sorted(found)}")
    if found:
        return found.pop()
    return MODEL_SPACE if any(array.whole is not None for array in source.arrays.values()) else ""


def needs_nothing(source: Source) -> bool:
    """Whether megatron-core 0.16 and later load the source as it is."""
    if source.backend != "torch_dist" or source.mixed:
        return False
    kind = source_type(source)
    return kind not in TARGETS or (kind == GATHERED and settings.is_described(source.settings))


def plan(source: Source, shards: Sequence[Shard], step: int | None = None) -> Plan:
    """Plan a migration. `shards` are those that the audit reads.

    Raises:
        UserError: elements are missing, a key is unknown, or the groups have different steps.
    """
    kind = source_type(source)
    target = TARGETS.get(kind, kind)
    settings.check_steps(source.settings, step)
    tensors, items, rows = _arrays(source, kind)
    made, more_rows = _objects(source, target, step)
    items += made
    every = [*shards, *_rest(shards, items)]
    renewed = settings.renewed(source.settings, target, step)
    return Plan(
        kind,
        target,
        tuple(every),
        tuple(tensors),
        tuple(_files(items, every)),
        settings.described(renewed, target) if target else renewed,
        (*rows, *more_rows),
        tuple(_warnings(source, kind)),
    )


def _warnings(source: Source, kind: str) -> Iterator[str]:
    if source.mixed:
        yield (
            f"rows of SwiGLU's W and V, which torch FSDP2 has mixed, are put in place in {len(source.mixed)} tensors: "
            "up to megatron-core 0.18 a run under FSDP2 loads them with the fix fsdp2_swiglu_rows only"
        )
    if kind == MODEL_SPACE and settings.are_of_rank_0(source.settings):
        yield (
            "the optimizer's parameter groups (learning rates, weight decay) are those of rank 0 alone, as releases up "
            "to 0.13.1 save them: where other pipeline ranks had other ones, set them anew"
        )
    values = [source.settings, *(own.value for own in source.objects)]
    if lacking := sum(map(settings.without_step, values)):
        yield (
            f"{lacking} of the optimizer's parameter groups have no step, and get that of the others: releases up to "
            "0.13.1 leave it out where a group has no parameters on the saving rank (empty_group_step)"
        )
    if kind in (BUCKETS, GATHERED) and settings.CONTENT not in source.settings and _has_uneven_parameters(source):
        yield (
            "if 0.7 saved it no later release loads its optimizer's state: since 0.8 a parameter begins at a multiple "
            f"of {ALIGNMENT} elements of its buffer, and here are parameters of other sizes"
        )


def _has_uneven_parameters(source: Source) -> bool:
    """Whether releases that align parameters place them differently in their buffers than 0.7 does."""
    weights = (array for name, array in source.arrays.items() if not keys.is_of_optimizer(name))
    return any(math.prod(chunk.shape) % ALIGNMENT for array in weights for chunk in array.chunks.values())


# Arrays


def _arrays(source: Source, kind: str) -> tuple[list[Tensor], list[Item], list[Row]]:
    """The new tensors, their items, and the table's rows for the arrays."""
    name_of, unpadded = _naming(source, kind)
    tensors: dict[str, Tensor] = {}
    items: list[Item] = []
    counts: dict[tuple[str, str, str], list[int]] = {}
    for array in source.arrays.values():
        name = name_of(array.name)
        if name is None:
            raise UserError(
                f"{source.found.path}: {array.name} is not a known state of the optimizer, and nothing "
                "was written: a checkpoint without it would not be complete"
            )
        if name in tensors:
            raise UserError(f"{source.found.path}: several arrays would become {name}, one of them {array.name}")
        own = _parts(source, array, kind, unpadded)
        size = _size(array, own)
        _check_parameter(source, array.name, size)
        tensors[name] = Tensor(name, array.dtype, size)
        made = [_chunk(name, array.dtype, part) for part in own]
        items += made
        count = counts.setdefault(_row_of(array.name, name), [0, 0])
        count[0] += 1
        count[1] += sum(nbytes(array.dtype, math.prod(part.shape)) for part in own)
    return list(tensors.values()), items, [Row(*row, *count) for row, count in counts.items()]


def _naming(source: Source, kind: str) -> tuple[Callable[[str], str | None], dict[keys.Bucket, int]]:
    """The function that returns an array's new name, and the length of each bucket without padding."""
    if kind == MODEL_SPACE:
        return keys.in_model_space, {}
    if kind == BUCKETS:
        unpadded = _unpadded(source)
        return (
            lambda name: name if keys.bucket_of(name) in unpadded or not keys.is_of_optimizer(name) else None,
            unpadded,
        )
    return lambda name: name, {}


def _parts(source: Source, array: Array, kind: str, unpadded: dict[keys.Bucket, int]) -> list[Part]:
    bucket = keys.bucket_of(array.name)
    if kind == BUCKETS and bucket is not None:
        return _cut(array, unpadded[bucket])
    if array.name in source.mixed:
        return _in_place(source, array)
    model = keys.model_key(array.name)
    if model is None:
        return chunk_cover.parts(array)
    return chunk_cover.parts(
        chunk_cover.with_full_shape(array, source.arrays.get(model)) if kind == MODEL_SPACE else array, join=True
    )


def _in_place(source: Source, array: Array) -> list[Part]:
    """The parts of an array whose rows of W and V torch FSDP2 has mixed, with the rows in place.

    Raises:
        UserError: it cannot be determined whether the rows are mixed.
    """
    grid, why_not = source.mixed[array.name]
    if grid is None:
        raise UserError(
            f"{source.found.path}: cannot tell whether rows of W and V are in place in {array.name}, and nothing was "
            f"written: {why_not}"
        )
    return swiglu_parts.parts(array, grid)


def _cut(array: Array, numel: int) -> list[Part]:
    """A bucket without the padding at its end, which depends on the number of data-parallel ranks."""
    whole = sorted(chunk_cover.parts(array, join=True), key=lambda part: part.offsets)
    padded = sum(math.prod(part.shape) for part in whole)
    if {len(part.shape) for part in whole} != {1} or numel > padded:
        raise UserError(f"{array.name}: expected {numel} elements without its padding, found {padded}")
    left, kept = nbytes(array.dtype, numel), []
    for extent in (extent for part in whole for extent in part.extents):
        if left:
            kept.append(extent._replace(nbytes=min(left, extent.nbytes)))
        left -= min(left, extent.nbytes)
    return [Part((0,), (numel,), tuple(kept))]


def _unpadded(source: Source) -> dict[keys.Bucket, int]:
    """The length of each bucket without padding, from the objects that state it.

    Raises:
        UserError: such an object has an unknown form.
    """
    found: dict[keys.Bucket, int] = {}
    for own in source.objects:
        group, _, what = own.key.rpartition("/")[0].rpartition(".")
        if what != "per_bucket_numel_unpadded":
            continue
        value = own.value[0] if own.is_list and isinstance(own.value, list) and own.value else own.value
        try:
            for number, buffer in enumerate(value):
                for dtype, buckets in buffer.items():
                    name = "(" + ", ".join(f"{part.__module__}.{part.__name__}" for part in dtype) + ")"
                    found |= {keys.Bucket(group, number, name, n): int(size) for n, size in enumerate(buckets)}
        except (TypeError, AttributeError, ValueError) as error:
            raise UserError(f"{own.key} does not record how long the buckets are: {error}") from None
    return found


def _size(array: Array, own: list[Part]) -> Shape:
    """The shape of the new tensor."""
    return tuple(
        max((part.offsets[axis] + part.shape[axis] for part in own), default=0)
        for axis in range(len(own[0].shape) if own else len(array.shape))
    )


def _check_parameter(source: Source, name: str, size: Shape) -> None:
    """Check that a state has the shape of its parameter."""
    model = keys.model_key(name)
    if model is None:
        return
    weight = source.arrays.get(model)
    if weight is None:
        raise UserError(f"{source.found.path}: {name} is the state of {model}, which is not there")
    if weight.shape != size:
        raise UserError(
            f"{source.found.path}: expected {name} of its parameter's shape {list(weight.shape)}, found {list(size)}"
        )


def _chunk(name: str, dtype: str, part: Part) -> Item:
    return Item(name, entry_layout.of_tensor(dtype, part.shape, part.extents), part.offsets, part.shape)


def _row_of(old: str, new: str) -> tuple[str, str, str]:
    """An array's kind, old name and new name, without the name of its parameter."""
    model = keys.model_key(old)
    if model is not None:
        return "optimizer", f"{old.removesuffix(model)}*", f"{new.removesuffix(model)}*"
    return ("optimizer", "buckets", "buckets") if keys.bucket_of(old) else ("model", "*", "*")


# Objects


def _objects(source: Source, target: str, step: int | None) -> tuple[list[Item], list[Row]]:
    """The items of the objects, and their row of the table."""
    names = keys.object_keys([own.key for own in source.objects])
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice:
        raise UserError(f"{source.found.path}: several objects would become {twice[0]}")
    items = [Item(names[own.key], _content(own, target, step)) for own in source.objects]
    rows = []
    if items:
        total = sum(item.content.nbytes for item in items)
        rows.append(Row("objects", "*/shard_*", "*/shard_*", len(items), total))
    return items, rows


def _content(own: Object, target: str, step: int | None) -> Torch | Raw:
    """The content of an object, unchanged if possible. Outside model space, each rank's param groups are an object.

    Raises:
        UserError: its groups have different steps.
    """
    settings.check_steps(own.value, step)
    if settings.without_step(own.value) or (settings.steps(own.value) - {step} and step is not None):
        value = settings.renewed(own.value, target, step)
        return entry_layout.of_value(value if own.is_list else [value], own.extent.path)
    return Raw(own.extent) if own.is_list else entry_layout.of_value([own.value], own.extent.path)


# Shards and files


def _rest(shards: Sequence[Shard], items: Sequence[Item]) -> list[Shard]:
    """Shards for the bytes of the items that no other shard reads. Their elements are not judged."""
    every = dict.fromkeys(extent for item in items for extent in item.extents)
    return rest((Record(*extent, 0, (0, 0)) for extent in every), shards)


def _files(items: Sequence[Item], shards: Sequence[Shard]) -> Iterator[OutputFile]:
    """Group the items into files. Items that need the same shard are in one file; shards keep their order."""
    number = itertools.count()
    own_items: list[Item] = []
    own_shards: list[int] = []
    held = 0
    for group_items, group_shards in _groups(items, shards):
        own_items += group_items
        own_shards += group_shards
        held += sum(item.content.nbytes for item in group_items)
        if held >= FILE:
            yield OutputFile(f"__0_{next(number)}.distcp", tuple(own_items), tuple(own_shards))
            own_items, own_shards, held = [], [], 0
    if own_items or own_shards:
        yield OutputFile(f"__0_{next(number)}.distcp", tuple(own_items), tuple(own_shards))


def _groups(items: Sequence[Item], shards: Sequence[Shard]) -> Iterator[tuple[list[Item], list[int]]]:
    """Groups of items that share shards, with these shards, in the order of each group's first shard."""
    leader = list(range(len(shards) + len(items)))

    def find(node: int) -> int:
        while leader[node] != node:
            leader[node] = node = leader[leader[node]]
        return node

    for nodes in _meeting(items, shards):
        first, *others = sorted(map(find, nodes))
        for node in others:
            leader[node] = first
    groups: dict[int, tuple[list[Item], list[int]]] = {}
    for node in range(len(leader)):
        own_items, own_shards = groups.setdefault(find(node), ([], []))
        if node < len(shards):
            own_shards.append(node)
        else:
            own_items.append(items[node - len(shards)])
    yield from groups.values()


def _meeting(items: Sequence[Item], shards: Sequence[Shard]) -> Iterator[list[int]]:
    """Sets of shards and items with overlapping bytes. The items' numbers follow those of the shards."""
    by_path: dict[str, list[tuple[int, int, int]]] = {}
    extents = (
        *((n, e) for n, shard in enumerate(shards) for stream in shard.streams.values() for e in stream.extents),
        *((len(shards) + n, extent) for n, item in enumerate(items) for extent in item.extents),
    )
    for node, extent in extents:
        if extent.nbytes:
            by_path.setdefault(extent.path, []).append((extent.offset, extent.offset + extent.nbytes, node))
    for ranges in by_path.values():
        together: list[int] = []
        end = 0
        for first, last, node in sorted(ranges):
            if first >= end and together:
                yield together
                together = []
            together.append(node)
            end = max(end, last)
        yield together
