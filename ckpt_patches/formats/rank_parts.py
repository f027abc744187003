"""A rank's part of a tensor in a torch.save file: of a DTensor (FSDP2, tensor parallelism) or a ShardedTensor (FSDP1).

https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from ckpt_patches.formats.torch_file import Instance, TensorHeader

REPLICATE = "Replicate"
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes within a tensor


@dataclass(frozen=True)
class Part:
    """A rank's part of a tensor."""

    size: tuple[int, ...]  # of the complete tensor
    tensors: tuple[TensorHeader, ...]
    placements: tuple[tuple[str, Any], ...] = ()  # DTensor, by mesh dimension: kind, sharded dimension
    coordinates: tuple[int, ...] = ()  # of the rank in the mesh
    boxes: tuple[Box, ...] = ()  # ShardedTensor: the boxes of `tensors`
    is_sharded: bool = False  # a ShardedTensor

    @property
    def is_plain(self) -> bool:
        return not self.placements and not self.is_sharded

    @property
    def places(self) -> list[tuple[Any, TensorHeader]]:
        """Its tensors with what identifies their elements: replicas are at one place."""
        if self.is_sharded:
            return list(zip(self.boxes, self.tensors, strict=True))
        cut = zip(self.coordinates, self.placements, strict=True)
        return [(tuple(at for at, (kind, _) in cut if kind != REPLICATE), self.tensors[0])]


def part_of(value: Any) -> Part | None:
    """A rank's part of a tensor; None if the value is not a tensor, or has an unknown form."""
    if isinstance(value, TensorHeader):
        return Part(value.shape, (value,))
    if not isinstance(value, Instance) or len(value.args) < 3 or not _are_sizes(value.args[2]):
        return None
    size, kind = tuple(value.args[2]), getattr(value.args[0], "__name__", "")
    if kind == "DTensor":
        return _of_dtensor(size, _fields(value))
    return _of_sharded(size, value.state) if kind == "ShardedTensor" else None


def _of_dtensor(size: tuple[int, ...], fields: Mapping[str, Any]) -> Part | None:
    local, spec = fields.get("_local_tensor"), _fields(fields.get("_spec"))
    placements, at = spec.get("placements"), _fields(spec.get("mesh")).get("_coordinate_on_dim")
    if not isinstance(local, TensorHeader) or not isinstance(placements, (tuple, list)) or not _are_sizes(at):
        return None
    kinds = tuple((type(own).__name__, _fields(own).get("dim")) for own in placements)
    is_known = len(kinds) == len(at) > 0 and len(local.shape) == len(size)
    return Part(size, (local,), kinds, tuple(at)) if is_known else None


def _of_sharded(size: tuple[int, ...], state: Any) -> Part | None:
    if not isinstance(state, tuple) or len(state) < 2 or not isinstance(state[0], list):
        return None
    shards = [_fields(shard) for shard in state[0]]
    boxes = [box for shard in shards if (box := _box(shard.get("metadata"), len(size))) is not None]
    tensors = [tensor for shard in shards if isinstance(tensor := shard.get("tensor"), TensorHeader)]
    is_known = len(shards) == len(boxes) == len(tensors)
    return Part(size, tuple(tensors), boxes=tuple(boxes), is_sharded=True) if is_known else None


def _fields(value: Any) -> dict[str, Any]:
    """The attributes of an object, including slots."""
    if not isinstance(value, Instance):
        return {}
    states = value.state if isinstance(value.state, tuple) else (value.state,)
    return {name: item for state in states if isinstance(state, dict) for name, item in state.items()}


def _box(value: Any, dimensions: int) -> Box | None:
    offsets, sizes = (_fields(value).get(f"shard_{what}") for what in ("offsets", "sizes"))
    if not _are_sizes(offsets) or not _are_sizes(sizes) or not len(offsets) == len(sizes) == dimensions:
        return None
    return tuple(offsets), tuple(sizes)


def _are_sizes(value: Any) -> TypeGuard[list[int] | tuple[int, ...]]:
    return isinstance(value, (list, tuple)) and all(type(one) is int and one >= 0 for one in value)


def untiled(parts: Mapping[int, Part]) -> Iterator[str]:
    """Yield why the ranks' parts of a tensor do not hold each of its elements once."""
    sizes = {part.size for part in parts.values()}
    if all(part.is_plain for part in parts.values()):
        return
    if len(sizes) > 1 or len({part.placements for part in parts.values()}) > 1:
        yield f"ranks state different shapes or placements: {' and '.join(map(str, sorted(sizes)))}"
        return
    held, counts, size = dict[Any, int](), Counter[Any](), sizes.pop()
    for rank, part in parts.items():
        for place, tensor in part.places:
            if part.is_sharded and tensor.shape != place[1]:
                yield f"rank {rank} holds {tensor.shape} at {place[0]}, for which {place[1]} is stated"
            if tensor.numel:
                counts[place] += 1
                held[place] = tensor.numel
    if len({*counts.values()}) > 1:
        yield f"ranks hold its {len(held)} parts unequally often"
    elif sum(held.values()) != math.prod(size):
        yield f"ranks hold {sum(held.values())} elements, its shape {size} has {math.prod(size)}"
