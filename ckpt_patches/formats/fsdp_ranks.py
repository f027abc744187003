"""Per-rank torch.save files of an FSDP run, as verl's FSDPCheckpointManager writes them: names and parts. Pure.

`model_world_size_<W>_rank_<R>.pt` holds `model.state_dict()`, whose tensors are DTensors with FSDP2 and ShardedTensors
with FSDP1; `optim_…` holds `optimizer.state_dict()`, `extra_state_…` the scheduler and RNG states.
https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

from ckpt_patches.formats import dcp
from ckpt_patches.formats.torch_dist import Tensor
from ckpt_patches.formats.torch_file import Instance, TensorHeader
from ckpt_patches.runtime.shown import shown

MODEL, OPTIMIZER, EXTRA = "model", "optim", "extra_state"
KINDS = {
    MODEL: "the file of its weights",
    OPTIMIZER: "the file of its optimizer",
    EXTRA: "the file of its other states",
}
NAME = re.compile(r"(model|optim|extra_state)_world_size_(\d{1,7})_rank_(\d{1,7})\.pt")
CONFIG = "fsdp_config.json"
REPLICATE, SHARD = "Replicate", "Shard"
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes within a tensor


class File(NamedTuple):
    """The fields of a file's name."""

    kind: str
    ranks: int
    rank: int


def named(name: str) -> File | None:
    """Parse the name of a rank's file; None for other names."""
    found = NAME.fullmatch(name)
    return File(found[1], int(found[2]), int(found[3])) if found else None


def world_size(text: bytes) -> int | None:
    """The number of ranks in the text of `fsdp_config.json`; None if it is absent or invalid."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    size = value.get("world_size") if isinstance(value, dict) else None
    return size if type(size) is int and size > 0 else None


@dataclass(frozen=True)
class Part:
    """A rank's part of a tensor."""

    size: tuple[int, ...]  # of the complete tensor
    tensors: tuple[TensorHeader, ...]
    placements: tuple[tuple[str, int | None], ...] = ()  # DTensor, by mesh dimension: kind, sharded dimension
    coordinates: tuple[int, ...] = ()  # of the rank in the mesh
    boxes: tuple[Box, ...] = ()  # ShardedTensor: the boxes of `tensors`
    every: tuple[Box, ...] = ()  # ShardedTensor: the boxes of all ranks

    @property
    def is_plain(self) -> bool:
        return not self.placements and not self.every


def part_of(value: Any) -> Part | None:
    """A rank's part of a tensor; None if the value is not a tensor, or has an unknown form."""
    if isinstance(value, TensorHeader):
        return Part(value.shape, (value,))
    if not isinstance(value, Instance) or len(value.args) < 3 or not _are_sizes(value.args[2]):
        return None
    size = tuple(value.args[2])
    kind = getattr(value.args[0], "__name__", "")
    if kind == "DTensor":
        return _of_dtensor(size, _fields(value))
    return _of_sharded(size, value.state) if kind == "ShardedTensor" else None


def _of_dtensor(size: tuple[int, ...], fields: Mapping[str, Any]) -> Part | None:
    local, spec = fields.get("_local_tensor"), _fields(fields.get("_spec"))
    placements, at = spec.get("placements"), _fields(spec.get("mesh")).get("_coordinate_on_dim")
    if not isinstance(local, TensorHeader) or not isinstance(placements, (tuple, list)) or not _are_sizes(at):
        return None
    kinds = tuple((type(own).__name__, _number(_fields(own).get("dim"))) for own in placements)
    is_known = len(kinds) == len(at) and len(local.shape) == len(size)
    return Part(size, (local,), kinds, tuple(at)) if is_known and kinds else None


def _of_sharded(size: tuple[int, ...], state: Any) -> Part | None:
    if not isinstance(state, tuple) or len(state) < 2 or not isinstance(state[0], list):
        return None
    shards = [_fields(shard) for shard in state[0]]
    listed = _fields(state[1]).get("shards_metadata")
    boxes = [_box(shard.get("metadata"), len(size)) for shard in shards]
    every = [_box(own, len(size)) for own in listed] if isinstance(listed, list) else []
    tensors = [tensor for shard in shards if isinstance(tensor := shard.get("tensor"), TensorHeader)]
    if not every or None in boxes or None in every or len(tensors) < len(shards):
        return None
    return Part(size, tuple(tensors), boxes=tuple(filter(None, boxes)), every=tuple(filter(None, every)))


def _fields(value: Any) -> dict[str, Any]:
    """The attributes of an object, including slots."""
    if not isinstance(value, Instance):
        return {}
    states = value.state if isinstance(value.state, tuple) else (value.state,)
    return {name: item for state in states if isinstance(state, dict) for name, item in state.items()}


def _box(value: Any, dimensions: int) -> Box | None:
    fields = _fields(value)
    offsets, sizes = fields.get("shard_offsets"), fields.get("shard_sizes")
    if not _are_sizes(offsets) or not _are_sizes(sizes) or not len(offsets) == len(sizes) == dimensions:
        return None
    return tuple(offsets), tuple(sizes)


def _number(value: Any) -> int | None:
    return value if type(value) is int else None


def _are_sizes(value: Any) -> TypeGuard[Sequence[int]]:
    return isinstance(value, (list, tuple)) and all(type(one) is int and one >= 0 for one in value)


def untiled(parts: Mapping[int, Part]) -> Iterator[str]:
    """Yield why the ranks' parts of a tensor do not hold each of its elements exactly once."""
    sizes = {part.size for part in parts.values() if not part.is_plain}
    if len(sizes) > 1:
        yield f"ranks state different shapes: {' and '.join(map(str, sorted(sizes)))}"
    elif len({(part.placements, part.every) for part in parts.values()}) > 1:
        yield "ranks state different placements"
    elif any(part.every for part in parts.values()):
        yield from _untiled_boxes(parts)
    elif sizes:
        yield from _untiled_mesh(parts)


def _untiled_boxes(parts: Mapping[int, Part]) -> Iterator[str]:
    first = next(iter(parts.values()))
    filled = [box for box in first.every if math.prod(box[1])]
    chunks = dict(filled)
    why = dcp.untiled(Tensor("", "", first.size, None, chunks))
    if (why and why != dcp.TOO_MANY) or len(chunks) < len(filled):
        yield why or "two ranks have the same part"
    held = set()
    for rank, part in parts.items():
        held |= {*part.boxes}
        for (begin, sizes), tensor in zip(part.boxes, part.tensors, strict=True):
            if tensor.shape != sizes or (tensor.numel and chunks.get(begin) != sizes):
                yield f"rank {rank} holds {tensor.shape} at {begin}, for which {chunks.get(begin)} is stated"
    absent = [begin for begin, sizes in filled if (begin, sizes) not in held]
    if absent:
        yield f"no rank holds the part at {absent[0]}"


def _untiled_mesh(parts: Mapping[int, Part]) -> Iterator[str]:
    """Check that each mesh position has equally many ranks, and that parts have the shapes of their placements."""
    mesh = [max(own) + 1 for own in zip(*(part.coordinates for part in parts.values()), strict=True)]
    places = Counter(part.coordinates for part in parts.values())
    if len(places) != math.prod(mesh) or len(set(places.values())) > 1:
        yield f"ranks are at {len(places)} places in a mesh of {' x '.join(map(str, mesh))}, {len(parts)} ranks"
        return
    seen: set[tuple[int, ...]] = set()
    numel = 0
    for rank, part in parts.items():
        shape, own = part.tensors[0].shape, _local(part, mesh)
        if own is not None and shape != own:
            yield f"rank {rank} holds {shape}, by its placements {own}"
            return
        cut = tuple(at for at, (kind, _) in zip(part.coordinates, part.placements, strict=True) if kind != REPLICATE)
        numel += 0 if cut in seen else part.tensors[0].numel
        seen.add(cut)
    size = next(iter(parts.values())).size
    if numel != math.prod(size):
        yield f"ranks hold {numel} elements, its shape {size} has {math.prod(size)}"


def _local(part: Part, mesh: Sequence[int]) -> tuple[int, ...] | None:
    """The shape of a rank's part. Each mesh dimension splits the result of those before it, as torch.chunk does.

    None if a placement has another kind.
    """
    shape = list(part.size)
    for (kind, dimension), count, at in zip(part.placements, mesh, part.coordinates, strict=True):
        if kind == REPLICATE:
            continue
        if kind != SHARD or dimension is None or not -len(shape) <= dimension < len(shape):
            return None
        most = -(-shape[dimension] // count)
        shape[dimension] = min(most, max(shape[dimension] - at * most, 0))
    return tuple(shape)


def unlike_keys(states: Mapping[int, Mapping[Any, Mapping[Any, Any]]]) -> Iterator[tuple[int, str]]:
    """Yield rank and message for states that a rank lacks and others have. `states` is by rank and parameter."""
    every: dict[Any, set[str]] = {}
    for own in states.values():
        for number, state in own.items():
            every.setdefault(number, set()).update(str(name) for name, value in state.items() if value is not None)
    for rank, own in states.items():
        for number, names in every.items():
            state = own.get(number, {})
            if number not in own:
                yield rank, f"parameter {shown(number)} has no state, and has one on other ranks"
            elif absent := sorted(names - {str(name) for name, value in state.items() if value is not None}):
                yield rank, f"parameter {shown(number)} has no {shown(absent[0])}, and has it on other ranks"


def unlike_steps(steps: Mapping[int, Mapping[Any, float]]) -> Iterator[tuple[int, str]]:
    """Yield rank and message for ranks that are not at the newest step, or have a parameter at another step."""
    highest = {rank: max(own.values(), default=None) for rank, own in steps.items()}
    newest = max((step for step in highest.values() if step is not None), default=None)
    first: dict[Any, tuple[float, int]] = {}
    for rank, own in steps.items():
        if highest[rank] not in (None, newest):
            yield rank, f"step {highest[rank]:g}, others are at {newest:g}"
            continue
        for number, step in own.items():
            other, where = first.setdefault(number, (step, rank))
            if step != other:
                yield rank, f"parameter {number} is at step {step:g}, and at {other:g} on rank {where}"
                break


def stated(files: Iterable[File], config: int | None) -> int:
    """The number of ranks of the newest save in a folder, from its configuration or else from most of its files."""
    counts = Counter(file.ranks for file in files)
    if config in counts:
        assert config is not None
        return config
    return max(counts, key=lambda count: (counts[count], count))
