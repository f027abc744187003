"""Transfer the list of repaired elements to a migrated checkpoint: find the same bytes in the output."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_patches.audit import repair_list
from ckpt_patches.audit.ranges import Range, joined
from ckpt_patches.audit.repair_list import Repaired
from ckpt_patches.formats import torch_dist_reader
from ckpt_patches.formats.checkpoint import Checkpoint, Shard
from ckpt_patches.formats.dtypes import item_size
from ckpt_patches.migrate.output import OutputFile


class Move(NamedTuple):
    """Bytes of an array's shard or of a file, and where the same bytes are in another one."""

    old: Any
    begin: int
    nbytes: int
    new: Any
    at: int


def write_list(source: Checkpoint, files: Iterable[OutputFile], folder: Path) -> None:
    """Write the list to a folder that has all files. Does nothing if the source has no list.

    Raises:
        UserError, OSError: the written files cannot be read.
    """
    listed = repair_list.read(replace(source, findings=[]))
    if not listed.ranges:
        return
    made = torch_dist_reader.read(folder)
    before, after = _item_sizes(source.shards), _item_sizes(made.shards)
    copies = [
        Move(extent.path, extent.offset, extent.nbytes, file.name, at) for file in files for extent, at in file.copies()
    ]
    now, changed = Repaired(), set[str]()
    for how in sorted(set(listed.sources.values())):
        sizes = {key: size for key, size in before.items() if listed.sources.get(key) == how}
        elements = {key: [(low * n, high * n) for low, high in listed.ranges[key]] for key, n in sizes.items()}
        written = moved(moved(elements, _in_files(source.shards)), copies)
        changed |= written.keys()
        back = (Move(Path(own.new).name, own.at, own.nbytes, own.old, own.begin) for own in _in_files(made.shards))
        for key, ranges in moved(written, back).items():
            now.add(key, [(low // after[key], -(-high // after[key])) for low, high in ranges], how)
    now.files = sorted(changed)
    repair_list.write(folder, now)


def moved(ranges: Mapping[Any, list[Range]], moves: Iterable[Move]) -> dict[Any, list[Range]]:
    """Where these bytes are after the moves; their ranges, sorted and disjoint. Other bytes are left out."""
    found: dict[Any, list[Range]] = {}
    ranges = {key: joined(own) for key, own in ranges.items()}
    for old, begin, nbytes, new, at in moves:
        own = ranges.get(old, [])
        for first, last in own[max(bisect_right(own, (begin,)) - 1, 0) :]:
            if first >= begin + nbytes:
                break
            low, high = max(first, begin), min(last, begin + nbytes)
            if low < high:
                found.setdefault(new, []).append((low - begin + at, high - begin + at))
    return {key: joined(own) for key, own in found.items()}


def _in_files(shards: Iterable[Shard]) -> Iterator[Move]:
    """The place of each shard's bytes in the files."""
    for shard in shards:
        for stream in shard.streams.values():
            begin = 0
            for path, offset, nbytes in stream.extents:
                yield Move((stream.array, shard.label), begin, nbytes, path, offset)
                begin += nbytes


def _item_sizes(shards: Iterable[Shard]) -> dict[tuple[str, str], int]:
    return {(own.array, shard.label): item_size(own.dtype) for shard in shards for own in shard.streams.values()}
