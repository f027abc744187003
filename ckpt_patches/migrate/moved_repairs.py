"""Transfer the list of repaired elements to a migrated checkpoint: find the same elements in the output."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from ckpt_patches.audit import repair_list
from ckpt_patches.audit.ranges import Range, joined
from ckpt_patches.audit.repair_list import Key, Repaired
from ckpt_patches.formats import torch_dist_reader
from ckpt_patches.formats.checkpoint import Checkpoint, Extent, Shard
from ckpt_patches.formats.dtypes import item_size
from ckpt_patches.migrate.migration_plan import Plan

# Byte ranges by file, sorted and disjoint.
Bytes = dict[str, list[Range]]


def write_list(source: Checkpoint, planned: Plan, folder: Path) -> None:
    """Write the list to a folder that has all files of a plan. Does nothing if the source has no list.

    Raises:
        UserError, OSError: the written files cannot be read.
    """
    listed = repair_list.read(replace(source, findings=[]))
    if not listed.ranges:
        return
    made = torch_dist_reader.read(folder)
    now = Repaired()
    for how in sorted(set(listed.sources.values())):
        chosen = {key: ranges for key, ranges in listed.ranges.items() if listed.sources[key] == how}
        moved = moved_bytes(bytes_of(planned.shards, chosen), planned, folder)
        now.files += [str(Path(name).relative_to(folder)) for name in moved]
        for key, ranges in ranges_of(made.shards, moved).items():
            now.add(key, ranges, how)
    repair_list.write(folder, now)


def bytes_of(shards: Iterable[Shard], ranges: dict[Key, list[Range]]) -> Bytes:
    """The byte ranges of these elements of shards. Elements outside the shards are left out."""
    found: Bytes = {}
    for shard in shards:
        for stream in shard.streams.values():
            size = item_size(stream.dtype)
            own = [(begin * size, end * size) for begin, end in ranges.get((stream.array, shard.label), [])]
            for extent, begin in _placed(stream.extents):
                for low, high in _within(own, begin, begin + extent.nbytes):
                    shift = extent.offset - begin
                    found.setdefault(extent.path, []).append((low + shift, high + shift))
    return {path: joined(own) for path, own in found.items()}


def moved_bytes(source: Bytes, planned: Plan, folder: Path) -> Bytes:
    """The byte ranges of the output to which a plan copies these source bytes."""
    found: Bytes = {}
    for file in planned.files:
        begins = accumulate((item.content.nbytes for item in file.items), initial=0)
        for item, begin in zip(file.items, begins, strict=False):
            for place, extents in zip(item.content.places, item.content.sources, strict=True):
                for extent, at in _placed(extents):
                    shift = begin + place + at - extent.offset
                    for low, high in _within(source.get(extent.path, []), extent.offset, extent.offset + extent.nbytes):
                        found.setdefault(str(folder / file.name), []).append((low + shift, high + shift))
    return {path: joined(own) for path, own in found.items()}


def ranges_of(shards: Iterable[Shard], places: Bytes) -> dict[Key, list[Range]]:
    """The elements of the shards that lie in these byte ranges."""
    found: dict[Key, list[Range]] = {}
    for shard in shards:
        for stream in shard.streams.values():
            size = item_size(stream.dtype)
            for extent, begin in _placed(stream.extents):
                shift = begin - extent.offset
                for low, high in _within(places.get(extent.path, []), extent.offset, extent.offset + extent.nbytes):
                    elements = ((low + shift) // size, -(-(high + shift) // size))
                    found.setdefault((stream.array, shard.label), []).append(elements)
    return {key: joined(own) for key, own in found.items()}


def _placed(extents: tuple[Extent, ...]) -> Iterator[tuple[Extent, int]]:
    """Each extent, with the number of bytes before it."""
    return zip(extents, accumulate((extent.nbytes for extent in extents), initial=0), strict=False)


def _within(ranges: list[Range], begin: int, end: int) -> Iterator[Range]:
    """The parts of sorted, disjoint ranges between `begin` and `end`."""
    for low, high in ranges[max(bisect_right(ranges, (begin,)) - 1, 0) :]:
        if low >= end:
            return
        if high > begin:
            yield max(low, begin), min(high, end)
