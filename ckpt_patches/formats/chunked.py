"""Arrays made of chunks, of torch.distributed.checkpoint and of zarr: how the chunks form the ranks' shards. Pure."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ckpt_patches.formats import damages
from ckpt_patches.formats.checkpoint import MASTER, Checkpoint, Extent, Shard, Stream
from ckpt_patches.formats.megatron_names import is_bucket
from ckpt_patches.formats.torch_dist import Offsets, Tensor

ALIGNMENT = 64  # elements; each parameter begins at a multiple in Megatron's buckets
MOST_CORNERS = 1 << 20  # of all chunks of a tensor, along the axes that it is cut along
TOO_MANY = "too many chunks to compare them"
Shape = tuple[int, ...]


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

    def unflattened(self, size: Shape) -> "Chunked":
        """The same with its weight's shape, if it is flattened and the index does not have the original shape."""
        own = self.tensor
        is_flattened = own.whole is None and len(own.size) == len(size) + 1 and math.prod(own.size) == math.prod(size)
        return replace(self, tensor=replace(own, whole=size)) if is_flattened else self

    def shards(self) -> dict[str, list[Offsets]]:
        """The chunks of each tensor-parallel rank's shard, in the order of their elements, by the shard's label.

        The label is the shard's index in the grid of shards, or its offset if the shards do not form a grid.
        """
        chunks = self.tensor.chunks
        labels = {at: at[:-1] for at in chunks}
        if self.tensor.whole is None:
            steps = {at: [*zip(at, (max(n, 1) for n in own), strict=True)] for at, own in chunks.items()}
            labels = {at: tuple(begin // n for begin, n in own) for at, own in steps.items()}
            is_grid = not any(begin % n for own in steps.values() for begin, n in own)
            if not is_grid or len(set(labels.values())) < len(chunks):
                labels = {at: at for at in chunks}
        found: dict[str, list[Offsets]] = {}
        for at in sorted(chunks):
            found.setdefault(".".join(map(str, labels[at])), []).append(at)
        return found

    def gaps(self) -> set[Offsets]:
        """The chunks of a bucket that are gaps between two parameters. `dp_reshardable` saves them.

        A parameter begins at a multiple of 64 elements, or continues at the start of a rank's part. A file's name
        states the rank that wrote it.
        """
        chunks, found = self.tensor.chunks, set[Offsets]()
        ranks = {at: place.path.rpartition("_")[0] for at, place in self.tensor.places.items()}
        for before, at in itertools.pairwise(sorted(chunks) if is_bucket(self.tensor.name) else ()):
            begin, length = sum(at), math.prod(chunks[at])
            fills_up = begin % ALIGNMENT > 0 and length < ALIGNMENT and (begin + length) % ALIGNMENT == 0
            if fills_up and at in ranks and ranks[at] == ranks.get(before):
                found.add(at)
        return found

    def shape(self, offsets: list[Offsets]) -> Shape:
        """The shape of a shard. If flattened: the tensor's original shape divided by the fragments on each axis."""
        if self.tensor.whole is None:
            return self.tensor.chunks[offsets[0]]
        shape = tuple(n // parts for n, parts in zip(self.tensor.whole, self.tensor.size, strict=False))
        numel = sum(math.prod(self.tensor.chunks[at]) for at in offsets)
        return shape if math.prod(shape) == numel else (numel,)

    def begin(self, offsets: list[Offsets]) -> Offsets:
        """The place of a shard's first element in the tensor, or in the bucket; empty if it has another shape."""
        if self.tensor.whole is None:
            return offsets[0]
        shape = self.shape(offsets)
        index = offsets[0][: len(self.tensor.whole)]
        is_in_place = len(shape) == len(index) and offsets[0][len(index) :] in ((), (0,))
        return tuple(at * n for at, n in zip(index, shape, strict=True)) if is_in_place else ()

    def untiled(self) -> str:
        """Why the chunks do not cover each element exactly once; empty if they do; `TOO_MANY` if unknown."""
        chunks, size = self.tensor.chunks, self.tensor.size
        stored = sum(map(math.prod, chunks.values()))
        if stored != math.prod(size):
            return f"its chunks have {stored} elements, its shape {size} has {math.prod(size)}"
        boxes = [*((at, own, 1) for at, own in chunks.items() if math.prod(own)), ((0,) * len(size), size, -1)]
        axes = [n for n, whole in enumerate(size) if any(at[n] or own[n] != whole for at, own, _ in boxes)]
        if not stored or len(boxes) << len(axes) > MOST_CORNERS:
            return TOO_MANY if stored else ""
        # How often each element is covered is determined by all chunks' corners, each with the sign of its parity.
        corners: Counter[Offsets] = Counter()
        for at, own, sign in boxes:
            for ends in itertools.product((0, 1), repeat=len(axes)):
                corner = tuple(at[n] + end * own[n] for n, end in zip(axes, ends, strict=True))
                corners[corner] += -sign if sum(ends) % 2 else sign
        return f"a chunk overlaps another one, or ends beyond its shape {size}" if any(corners.values()) else ""


def shards_of(found: Checkpoint, parameter: str, roles: dict[str, Chunked]) -> Iterator[Shard]:
    """The shards of a parameter. Parts of its arrays with the same label and shape are streams of one shard.

    Adds a finding for arrays that are sharded otherwise than the main parameter, which are not compared.
    """
    cut = {
        role: {(label, own.shape(offsets)): offsets for label, offsets in own.shards().items()}
        for role, own in roles.items()
    }
    if len(set(map(frozenset, cut.values()))) > 1 and {len(own.tensor.size) for own in roles.values()} == {1}:
        # 1-D arrays that are sharded differently become one shard each.
        cut = {role: {("", own.tensor.size): sorted(own.tensor.chunks)} for role, own in roles.items()}
    for role, own in roles.items() if MASTER in roles else ():
        if (own.full, cut[role].keys()) != (roles[MASTER].full, cut[MASTER].keys()):
            detail = "cut otherwise than the master parameter: they were not compared"
            found.add(damages.NOT_JUDGED, own.tensor.name, detail)
    shards: dict[tuple[str, Shape], Shard] = {}
    for role, own in roles.items():
        gaps = own.gaps()
        for key, offsets in cut[role].items():
            there = next((held for held in (own.extents, own.lost) if all(at in held for at in offsets)), None)
            is_complete = sum(math.prod(own.tensor.chunks[at]) for at in offsets) == math.prod(key[1])
            if there is None or not offsets or not is_complete:
                continue
            if key not in shards:
                begin, is_gap = own.begin(offsets), bool(gaps & set(offsets))
                has_rows = not is_bucket(parameter)
                shards[key] = Shard(parameter, *key, {}, has_rows=has_rows, is_padding=is_gap, begin=begin)
            streams = shards[key].lost if there is own.lost else shards[key].streams
            streams[role] = Stream(own.tensor.name, own.tensor.dtype, tuple(there[at] for at in offsets))
    yield from shards.values()
