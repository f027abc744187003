"""Arrays made of chunks, of torch.distributed.checkpoint and of zarr: how the chunks form the ranks' shards. Pure."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ckpt_patches.formats import damages
from ckpt_patches.formats.checkpoint import MASTER, Checkpoint, Extent, Shard, Stream
from ckpt_patches.formats.megatron_names import is_bucket
from ckpt_patches.formats.torch_dist import Offsets, Tensor

ALIGNMENT = 64  # elements; each parameter begins at a multiple in Megatron's buckets
MOST_CELLS = 1 << 26  # of the grid that finds overlapping chunks
TOO_MANY = "too many chunks to compare them"
Shape = tuple[int, ...]
Key = tuple[str, Shape]  # a shard's label and shape


class Object(NamedTuple):
    """An object that torch.save wrote: its bytes, and its value with stubs of classes and tensors."""

    extent: Extent
    value: Any  # None if it cannot be read


@dataclass(frozen=True)
class Chunked:
    """A tensor, and the place of each chunk's elements. Chunks that cannot be read are in neither dict."""

    tensor: Tensor
    extents: dict[Offsets, Extent] = field(default_factory=dict)
    lost: dict[Offsets, Extent] = field(default_factory=dict)  # chunks without a file, or with a short one

    @property
    def full(self) -> Shape:
        """The tensor's shape, the original one of a flattened tensor."""
        return self.tensor.size if self.tensor.whole is None else self.tensor.whole

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
            if fills_up and (rank := self._rank(at)) and rank == self._rank(before):
                found.add(at)
        return found

    def _rank(self, offsets: Offsets) -> str:
        """The rank that wrote a chunk, from the file's name; empty if unknown, and in zarr."""
        place = self.tensor.places.get(offsets)
        return "" if place is None else place.path.rpartition("_")[0]

    def shape(self, offsets: list[Offsets]) -> Shape:
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

    def untiled(self) -> str:
        """Why the chunks do not cover each element exactly once; empty if they do; `TOO_MANY` if unknown."""
        chunks, size = self.tensor.chunks, self.tensor.size
        for at, own in chunks.items():
            if any(offset + n > whole for offset, n, whole in zip(at, own, size, strict=True)):
                return f"the chunk at {at} ends beyond the tensor's shape {size}"
        stored = sum(map(math.prod, chunks.values()))
        if stored != math.prod(size):
            return f"its chunks have {stored} elements, its shape {size} has {math.prod(size)}"
        if len(chunks) < 2 or not stored:
            return ""
        return self._overlap()

    def _overlap(self) -> str:
        """The message for two chunks with the same elements; empty if no two overlap."""
        chunks = self.tensor.chunks
        # The cells between all edges of chunks: each belongs to one chunk.
        numbers = []
        for axis in range(len(self.tensor.size)):
            edges = {edge for at, own in chunks.items() for edge in (at[axis], at[axis] + own[axis])}
            numbers.append({edge: number for number, edge in enumerate(sorted(edges))})
        if math.prod(map(len, numbers)) > MOST_CELLS:
            return TOO_MANY
        cells = np.zeros([len(own) for own in numbers], np.uint8)
        for at, own in chunks.items():
            place = tuple(slice(number[a], number[a + n]) for number, a, n in zip(numbers, at, own, strict=True))
            if cells[place].any():
                return f"the chunk at {at} overlaps another one"
            cells[place] = 1
        return ""


def _label(index: Offsets) -> str:
    return ".".join(map(str, index))


def shards_of(found: Checkpoint, parameter: str, roles: dict[str, Chunked]) -> Iterator[Shard]:
    """The shards of a parameter. Parts of its arrays with the same label and shape are streams of one shard.

    Adds a finding for arrays that are sharded otherwise than the main parameter, which are not compared.
    """
    cut = _cut(roles)
    for role, own in roles.items() if MASTER in roles else ():
        if (own.full, cut[role].keys()) != (roles[MASTER].full, cut[MASTER].keys()):
            detail = "cut otherwise than the master parameter: they were not compared"
            found.add(damages.NOT_JUDGED, own.tensor.name, detail)
    shards: dict[Key, Shard] = {}
    for role, own in roles.items():
        gaps = own.gaps()
        for key, offsets in cut[role].items():
            there = next((held for held in (own.extents, own.lost) if all(at in held for at in offsets)), None)
            if there is None:
                continue
            if key not in shards:
                begin, is_gap = own.begin(offsets), bool(gaps & set(offsets))
                has_rows = not is_bucket(parameter)
                shards[key] = Shard(parameter, *key, {}, has_rows=has_rows, is_padding=is_gap, begin=begin)
            shard = shards[key]
            streams = shard.lost if there is own.lost else shard.streams
            streams[role] = Stream(own.tensor.name, own.tensor.dtype, tuple(there[at] for at in offsets))
    yield from shards.values()


def _cut(roles: dict[str, Chunked]) -> dict[str, dict[Key, list[Offsets]]]:
    """The chunks of each shard, by role. 1-D arrays that are sharded differently become one shard each."""
    cut = {
        role: {(label, own.shape(offsets)): offsets for label, offsets in own.shards().items()}
        for role, own in roles.items()
    }
    sizes = {len(own.tensor.size) for own in roles.values()}
    if len(set(map(frozenset, cut.values()))) > 1 and sizes == {1}:
        return {role: {("", own.tensor.size): sorted(own.tensor.chunks)} for role, own in roles.items()}
    return cut
