"""Reader for FSDP checkpoints with torch.save files for each rank, as verl's FSDPCheckpointManager writes them.

`model_world_size_<W>_rank_<R>.pt` holds `model.state_dict()`, whose tensors are DTensors with FSDP2 and ShardedTensors
with FSDP1; `optim_…` holds `optimizer.state_dict()`, `extra_state_…` the scheduler and RNG states.
https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from ckpt_patches.errors import UserError
from ckpt_patches.formats import damages, settings, tensor_streams, torch_optimizers, zero_inventory, zero_keys
from ckpt_patches.formats.checkpoint import ALONE, WEIGHT, Checkpoint, Shard, last_step
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.dcp_reader import set_step
from ckpt_patches.formats.paths import path_within
from ckpt_patches.formats.ranged import read_metadata
from ckpt_patches.formats.tensor_streams import groups_of, states_of
from ckpt_patches.formats.torch_file import Instance, TensorHeader, TorchFile
from ckpt_patches.runtime.shown import shown

FORMAT, WEIGHTS_ALONE = "fsdp, a file for each rank", f"fsdp, a file for each rank{ALONE}"
MODEL, OPTIMIZER, EXTRA = "model", "optim", "extra_state"
KINDS = {
    MODEL: "the file of its weights",
    OPTIMIZER: "the file of its optimizer",
    EXTRA: "the file of its other states",
}
NAME = re.compile(r"(model|optim|extra_state)_world_size_(\d{1,7})_rank_(\d{1,7})\.pt")
CONFIG = "fsdp_config.json"
MOST_KEYS = 5  # contradictions reported per file
REPLICATE = "Replicate"
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes within a tensor


# A rank's part of a tensor: of a DTensor (FSDP2, tensor parallelism) or a ShardedTensor (FSDP1)


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


# The ranks' files


class Name(NamedTuple):
    """The fields of a file's name."""

    kind: str
    ranks: int
    rank: int


def named(name: str) -> Name | None:
    """Parse the name of a rank's file; None for other names."""
    own = NAME.fullmatch(name)
    return Name(own[1], int(own[2]), int(own[3])) if own else None


def is_rank_files(path: Path) -> bool:
    """Whether a folder contains a rank's file."""
    return any(named(own.name) for own in path.iterdir())


@dataclass(frozen=True)
class _Ranks:
    """The readable files of one save, and the parts of tensors in them by their names there."""

    count: int
    files: dict[str, dict[int, TorchFile]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    parts: dict[str, dict[int, dict[str, Part]]] = field(default_factory=lambda: {MODEL: {}, OPTIMIZER: {}})

    def of_tensors(self, kind: str) -> dict[str, dict[int, Part]]:
        """The parts of each tensor by rank."""
        found: dict[str, dict[int, Part]] = {}
        for rank, parts in sorted(self.parts[kind].items()):
            for name, part in parts.items():
                found.setdefault(name, {})[rank] = part
        return found

    @property
    def is_fsdp1(self) -> bool:
        return any(part.is_sharded for own in self.parts[MODEL].values() for part in own.values())


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint, with findings for the problems of its files."""
    found = Checkpoint(path, FORMAT)
    ranks = _read_files(found)
    for kind, own in ranks.files.items():
        found.findings += _unlike(kind, own)
    _read_weights(found, ranks)
    steps = _read_optimizers(found, ranks)
    set_step(found, [step for own in steps.values() for step in own.values()], path.name, path.parent.name)
    found.findings += _unlike_steps(ranks, steps)
    for kind in ranks.parts:
        for name, parts in ranks.of_tensors(kind).items():
            if len(parts) == ranks.count:
                found.findings += [Finding(damages.FRAGMENTS, name, why) for why in untiled(parts)]
    found.findings += _without_states(ranks)
    found.format = FORMAT if ranks.files[OPTIMIZER] else WEIGHTS_ALONE
    return found


def _read_files(found: Checkpoint) -> _Ranks:
    """Read all files of the newest save. Files for another number of ranks are older; a load ignores them."""
    every = {path.name: own for path in sorted(found.path.iterdir()) if (own := named(path.name))}
    counts = Counter(own.ranks for own in every.values())
    config = _world_size(found)
    usual = max(counts, key=lambda count: (counts[count], count))
    ranks = _Ranks(config if config is not None and config in counts else usual)
    if config not in (None, ranks.count):
        found.add(damages.CONTRADICTION, CONFIG, f"it states {config} ranks, and the names of the files {ranks.count}")
    there: dict[str, set[int]] = defaultdict(set)
    for name, own in every.items():
        file = tensor_streams.read_file(found.path / name, found)
        if own.ranks != ranks.count:
            detail = f"a rank's file of a save of {own.ranks} ranks, beside one of {ranks.count}"
            found.add(damages.UNUSUAL, name, detail)
            continue
        there[own.kind].add(own.rank)
        if file is not None and (why := _why_foreign(file, own)):
            found.findings.append(why)
        if file is not None and isinstance(file.value, dict) and own.rank < ranks.count:
            ranks.files[own.kind][own.rank] = file
    for kind in KINDS:
        if kind in there or kind == MODEL:
            absent = zero_inventory.absent_ranks(there[kind], ranks.count, KINDS[kind])
            found.findings += absent
    return ranks


def _world_size(found: Checkpoint) -> int | None:
    """The number of ranks in verl's configuration; None if that is absent, or, with a finding, if it is invalid."""
    try:
        value = json.loads(read_metadata(path_within(found.path, CONFIG)))
        size = value.get("world_size") if isinstance(value, dict) else None
    except FileNotFoundError:
        return None
    except UserError as error:
        found.findings.append(tensor_streams.refused(error, CONFIG))
        return None
    except (OSError, ValueError, RecursionError):
        size = None
    if type(size) is int and size > 0:
        return size
    found.add(damages.BAD_METADATA, CONFIG, "it states no number of ranks")
    return None


def _why_foreign(file: TorchFile, own: Name) -> Finding | None:
    """The finding for another rank's file. torch.save names the root folder in the archive after the file."""
    name, written_as = file.path.name, f"{file.root}.pt"
    if named(written_as) not in (None, own):
        return Finding(damages.FOREIGN_FILE, name, f"it was written as {written_as}")
    if own.rank >= own.ranks:
        return Finding(damages.FOREIGN_FILE, name, f"of {own.ranks} ranks")
    if not isinstance(file.value, dict):
        return Finding(damages.CONTRADICTION, name, f"expected a dict, found {shown(type(file.value).__name__)}")
    return None


def _unlike(kind: str, files: Mapping[int, TorchFile]) -> Iterator[Finding]:
    """Differences between the ranks' files. One program writes them, so keys and plain values must be the same."""
    keys = {rank: zero_keys.keys_of(file.value) for rank, file in files.items()}
    usual = zero_keys.usual(keys.values())
    for rank, own in keys.items():
        for what in list(zero_keys.contradictions(own, usual))[:MOST_KEYS]:
            yield Finding(damages.CONTRADICTION, files[rank].path.name, what)
    by_rank = [files[rank] for rank in sorted(files)] if kind == OPTIMIZER else []
    for other in by_rank[1:]:
        for number, (own, first) in enumerate(zip(groups_of(other.value), groups_of(by_rank[0].value), strict=False)):
            unlike = list(settings.differences(own, first))
            unlike += ["its parameters are others than those"] if own.get("params") != first.get("params") else []
            for what in unlike:
                detail = f"group {number}: {what} in {by_rank[0].path.name}"
                yield Finding(damages.CONTRADICTION, other.path.name, detail)


def _read_weights(found: Checkpoint, ranks: _Ranks) -> None:
    for rank, file in sorted(ranks.files[MODEL].items()):
        parts = {str(name): part for name, value in file.value.items() if (part := _part(found, str(name), value))}
        ranks.parts[MODEL][rank] = parts
        if not parts:
            found.add(damages.MISSING_WEIGHT, file.path.name, "it holds no weight")
        for name, part in parts.items():
            for number, tensor in enumerate(part.tensors):
                stream = tensor_streams.stream(found, file.path, name, tensor)
                if stream is not None and stream.numel:
                    label = f"rank {rank}" + (f", part {number}" if number else "")
                    found.shards.append(Shard(name, label, tensor.shape, {WEIGHT: stream}))


def _part(found: Checkpoint, name: str, value: Any) -> Part | None:
    """A rank's part of a tensor; None for any other value. A tensor of an unknown form adds a finding."""
    part = part_of(value)
    if part is None and type(value).__name__ == "_rebuild_wrapper_subclass":
        found.add(damages.NOT_JUDGED, name[:200], "a tensor in parts, of a form that is not known")
    return part


def _read_optimizers(found: Checkpoint, ranks: _Ranks) -> dict[int, dict[Any, Any]]:
    """Check the optimizers' files and add shards of their moments. Returns the steps by rank and parameter."""
    steps = {}
    for rank, file in sorted(ranks.files[OPTIMIZER].items()):
        there = torch_optimizers.KEYS & file.value.keys()
        if there != torch_optimizers.KEYS:
            kind = damages.MISSING_STATE if there else damages.NOT_JUDGED
            detail = "expected state and param_groups, as a torch optimizer's state dict has them"
            found.add(kind, file.path.name, detail, shard=f"rank {rank}")
        parts = ranks.parts[OPTIMIZER].setdefault(rank, {})
        local = {number: _local(found, parts, number, state) for number, state in states_of(file.value).items()}
        value = {**file.value, "state": local}
        steps[rank] = torch_optimizers.take(found, file, value, "state", f"rank {rank}")
    return steps


def _local(found: Checkpoint, parts: dict[str, Part], number: Any, state: Mapping[Any, Any]) -> dict[Any, Any]:
    """A parameter's states with the rank's own part in place of each tensor, which is added to `parts`."""
    own = dict(state)
    for name, value in state.items():
        array = f"state.{number!s:.100}.{name!s:.100}"
        part = _part(found, array, value) if name != "step" else None
        if part is not None:
            parts[array] = part
            own[name] = part.tensors[0] if len(part.tensors) == 1 else None
    return own


def _unlike_steps(ranks: _Ranks, steps: Mapping[int, Mapping[Any, Any]]) -> Iterator[Finding]:
    """Ranks that are not at the newest step, or have a parameter at another step than another rank."""
    newest = last_step(step for own in steps.values() for step in own.values())
    first: dict[Any, tuple[float, int]] = {}
    for rank, own in steps.items():
        name, highest = ranks.files[OPTIMIZER][rank].path.name, last_step(own.values())
        if highest not in (None, newest):
            yield Finding(damages.MIXED_STEPS, name, f"step {highest}, others are at {newest}")
            continue
        counted = {number: step for number, step in own.items() if settings.is_step(step)}
        unlike = [number for number, step in counted.items() if first.setdefault(number, (step, rank))[0] != step]
        if unlike:
            step, where = first[unlike[0]]
            detail = f"parameter {shown(unlike[0])} is at step {counted[unlike[0]]:g}, and at {step:g} on rank {where}"
            yield Finding(damages.MIXED_STEPS, name, detail)


def _without_states(ranks: _Ranks) -> Iterator[Finding]:
    """States that a rank lacks, and others have."""
    parts, files = ranks.of_tensors(OPTIMIZER), ranks.files[OPTIMIZER]
    if ranks.is_fsdp1 and any(len({part.size for part in own.values()}) > 1 for own in parts.values()):
        yield from _without_elements(ranks, parts)
        return
    states = {
        rank: {
            (number, str(key)) for number, own in states_of(file.value).items() for key in own if own[key] is not None
        }
        for rank, file in files.items()
    }
    every = {one for own in states.values() for one in own}
    for rank, there in states.items():
        absent = sorted({f"parameter {shown(number)} has no {shown(key)}" for number, key in every - there})
        for what in absent[:MOST_KEYS]:
            yield Finding(damages.CONTRADICTION, files[rank].path.name, f"{what}, and has it on other ranks")


def _without_elements(ranks: _Ranks, parts: Mapping[str, Mapping[int, Part]]) -> Iterator[Finding]:
    """The same if FSDP1 steps the original parameters, and a rank has no state of one that it has no elements of.

    All ranks together have as many elements as a weight.
    """
    files = ranks.files[OPTIMIZER]
    groups = [group for file in files.values() for group in groups_of(file.value)]
    named = {str(number) for group in groups for number in _params(group)}
    if without := named - {str(number) for file in files.values() for number in states_of(file.value)}:
        detail = f"{len(without)} parameters have no state on any rank, such as {shown(min(without))}"
        yield Finding(damages.UNUSUAL, "optimizer", detail)
    if not len(files) == len(ranks.parts[MODEL]) == ranks.count:
        return
    weights = {sum(map(_elements, own.values())) for own in ranks.of_tensors(MODEL).values()}
    for name, own in parts.items():
        count = sum(map(_elements, own.values()))
        if name.endswith(torch_optimizers.OF_ELEMENTS) and count not in weights:
            detail = f"ranks hold {count} elements, and no weight of the model has as many"
            yield Finding(damages.MISSING_STATE, name, detail)


def _elements(part: Part) -> int:
    """The number of elements that a rank holds."""
    return sum(tensor.numel for tensor in part.tensors)


def _params(group: Mapping[str, Any]) -> list[Any]:
    params = group.get("params")
    return list(params) if isinstance(params, (list, tuple)) else []
