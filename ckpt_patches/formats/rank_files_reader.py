"""Reader for FSDP checkpoints with torch.save files for each rank, as verl's FSDPCheckpointManager writes them.

`model_world_size_<W>_rank_<R>.pt` holds `model.state_dict()`, whose tensors are DTensors with FSDP2 and ShardedTensors
with FSDP1; `optim_…` holds `optimizer.state_dict()`, `extra_state_…` the scheduler and RNG states.
https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ckpt_patches.formats import (
    damages,
    settings,
    tensor_streams,
    torch_optimizers,
    trainer_files,
    zero_inventory,
    zero_keys,
)
from ckpt_patches.formats.checkpoint import ALONE, WEIGHT, Checkpoint, Shard, last_step
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.dcp_reader import set_step
from ckpt_patches.formats.tensor_streams import groups_of, read_json, states_of
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
BOX = ("offsets", "sizes")  # of a ShardedTensor's part


class Part(NamedTuple):
    """A rank's part of a tensor: of a DTensor (FSDP2, tensor parallelism), of a ShardedTensor (FSDP1), or all of it."""

    size: tuple[int, ...]  # of the complete tensor
    tensors: tuple[TensorHeader, ...]
    # What identifies the elements of each; replicas are at one place. Of a ShardedTensor: offsets and sizes.
    places: tuple[tuple[Any, ...], ...] = ()
    cut: Any = None  # a DTensor's placements, by mesh dimension; True for a ShardedTensor; None if it is not cut


Parts: TypeAlias = dict[int, dict[str, Part]]  # by rank and name
Files: TypeAlias = dict[str, dict[int, TorchFile]]  # by kind and rank


def part_of(value: Any) -> Part | None:
    """A rank's part of a tensor; None if the value is not a tensor, or has an unknown form."""
    if isinstance(value, TensorHeader):
        return Part(value.shape, (value,))
    size = _sizes(value.args[2]) if isinstance(value, Instance) and len(value.args) > 2 else None
    if size is None:
        return None
    kind, fields = getattr(value.args[0], "__name__", ""), _fields(value)
    if kind == "DTensor":
        spec, local = _fields(fields.get("_spec")), fields.get("_local_tensor")
        at, placements = _sizes(_fields(spec.get("mesh")).get("_coordinate_on_dim")), spec.get("placements")
        if not isinstance(local, TensorHeader) or not isinstance(placements, (tuple, list)) or not at:
            return None
        cut = tuple((type(own).__name__, shown(_fields(own).get("dim"))) for own in placements)
        if len(cut) != len(at) or len(local.shape) != len(size):
            return None
        return Part(size, (local,), (tuple(n for n, own in zip(at, cut, strict=True) if own[0] != "Replicate"),), cut)
    held = value.state[0] if isinstance(value.state, tuple) and value.state else None
    if kind != "ShardedTensor" or not isinstance(held, list):
        return None
    shards = list(map(_fields, held))
    tensors = tuple(own for shard in shards if isinstance(own := shard.get("tensor"), TensorHeader))
    boxes = [[_sizes(_fields(shard.get("metadata")).get(f"shard_{of}")) for of in BOX] for shard in shards]
    places = tuple(tuple(own for own in box if own is not None and len(own) == len(size)) for box in boxes)
    is_known = len(shards) == len(tensors) and all(len(place) == len(BOX) for place in places)
    return Part(size, tensors, places, True) if is_known else None


def _fields(value: Any) -> dict[str, Any]:
    """The attributes of an object, including slots."""
    if not isinstance(value, Instance):
        return {}
    states = value.state if isinstance(value.state, tuple) else (value.state,)
    return {name: item for state in states if isinstance(state, dict) for name, item in state.items()}


def _sizes(value: Any) -> tuple[int, ...] | None:
    are_sizes = isinstance(value, (list, tuple)) and all(type(one) is int and one >= 0 for one in value)
    return tuple(value) if are_sizes else None


def untiled(parts: Mapping[int, Part]) -> str:
    """Why the ranks' parts of a tensor do not hold each of its elements once; empty if they do."""
    kinds = {(part.size, part.cut) for part in parts.values()}
    if all(cut is None for _, cut in kinds):
        return ""
    if len(kinds) > 1:
        sizes = " and ".join(map(str, sorted({size for size, _ in kinds})))
        return f"ranks state different shapes or placements: {sizes}"
    every = [own for part in parts.values() for own in zip(part.places, part.tensors, strict=True) if own[1].numel]
    held, (size, cut) = {place: tensor.numel for place, tensor in every}, kinds.pop()
    if cut is True and any(tensor.shape != place[1] for place, tensor in every):
        return "a rank's part has another shape than the one that is stated for it"
    if len({*Counter(place for place, _ in every).values()}) > 1:
        return f"ranks hold its {len(held)} parts unequally often"
    if sum(held.values()) != math.prod(size):
        return f"ranks hold {sum(held.values())} elements, its shape {size} has {math.prod(size)}"
    return ""


def is_rank_files(path: Path) -> bool:
    """Whether a folder contains a rank's file."""
    return any(NAME.fullmatch(own.name) for own in path.iterdir())


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint, with findings for the problems of its files."""
    found = Checkpoint(path, FORMAT)
    count, files = _read_files(found)
    for kind, own in files.items():
        found.findings += _unlike(kind, own)
    weights = {rank: _read_weights(found, file, rank) for rank, file in sorted(files[MODEL].items())}
    states: Parts = {}
    steps = {rank: _read_optimizer(found, file, rank, states) for rank, file in sorted(files[OPTIMIZER].items())}
    taken = [step for own in steps.values() for step in own.values()]
    if trainer_files.is_unstepped([file.value for file in files[OPTIMIZER].values()]):
        schedulers = [file.value.get("lr_scheduler") for file in files[EXTRA].values()]
        counted = last_step(map(trainer_files.counted, schedulers))
        found.findings += trainer_files.without_states(counted)
        taken = [0] if counted is None else []  # verl's actor takes none while its critic warms up
    set_step(found, taken, path.name, path.parent.name)
    found.findings += _unlike_steps(files[OPTIMIZER], steps)
    for parts in (weights, states):
        for name, of_ranks in _by_name(parts).items():
            if len(of_ranks) == count:
                found.findings += [Finding(damages.FRAGMENTS, name, why)] if (why := untiled(of_ranks)) else []
    found.findings += _without_states(files[OPTIMIZER], weights, states, count)
    found.format = FORMAT if files[OPTIMIZER] else WEIGHTS_ALONE
    return found


def _by_name(parts: Parts) -> dict[str, dict[int, Part]]:
    """The parts of each tensor by rank."""
    found: dict[str, dict[int, Part]] = {}
    for rank, own in sorted(parts.items()):
        for name, part in own.items():
            found.setdefault(name, {})[rank] = part
    return found


def _read_files(found: Checkpoint) -> tuple[int, Files]:
    """The number of ranks and the files of the newest save. A load ignores files for another number of ranks."""
    names = sorted(path.name for path in found.path.iterdir())
    every = {name: own for name in names if (own := _named(name))}
    counts = Counter(count for _, count, _ in every.values())
    count = max(counts, key=lambda count: (counts[count], count))
    stated = read_json(found.path, CONFIG) if CONFIG in names else {}
    if isinstance(stated, Finding):
        found.findings.append(stated)
    elif CONFIG in names:
        size = stated.get("world_size")
        if type(size) is int and size in counts:
            count = size
        else:
            detail = f"it states {shown(size)} ranks, and the names of the files {count}"
            found.add(damages.CONTRADICTION, CONFIG, detail)
    files: Files = {kind: {} for kind in KINDS}
    there: dict[str, set[int]] = defaultdict(set)
    for name, (kind, of, rank) in every.items():
        file = tensor_streams.read_file(found.path / name, found)
        if of != count:
            found.add(damages.UNUSUAL, name, f"a rank's file of a save of {of} ranks, beside one of {count}")
            continue
        there[kind].add(rank)
        if file is None:
            continue
        written_as = f"{file.root}.pt"  # torch.save names the folder of the records after the file
        if _named(written_as) not in (None, (kind, of, rank)) or rank >= count:
            found.add(damages.FOREIGN_FILE, name, f"of {count} ranks, written as {written_as}")
        if not isinstance(file.value, dict):
            found.add(damages.CONTRADICTION, name, f"expected a dict, found {shown(type(file.value).__name__)}")
        elif rank < count:
            files[kind][rank] = file
    for kind in (kind for kind in KINDS if kind in there or kind == MODEL):
        found.findings += zero_inventory.absent_ranks(there[kind], count, KINDS[kind])
    return count, files


def _named(name: str) -> tuple[str, int, int] | None:
    """The kind, the number of ranks and the rank in the name of a rank's file; None for other names."""
    own = NAME.fullmatch(name)
    return (own[1], int(own[2]), int(own[3])) if own else None


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


def _read_weights(found: Checkpoint, file: TorchFile, rank: int) -> dict[str, Part]:
    parts = {str(name): part for name, value in file.value.items() if (part := _part(found, str(name), value))}
    if not parts:
        found.add(damages.MISSING_WEIGHT, file.path.name, "it holds no weight")
    for name, part in parts.items():
        for number, tensor in enumerate(part.tensors):
            stream = tensor_streams.stream(found, file.path, name, tensor)
            if stream is not None and stream.numel:
                label = f"rank {rank}" + (f", part {number}" if number else "")
                found.shards.append(Shard(name, label, tensor.shape, {WEIGHT: stream}))
    return parts


def _part(found: Checkpoint, name: str, value: Any) -> Part | None:
    """A rank's part of a tensor; None for any other value. A tensor of an unknown form adds a finding."""
    part = part_of(value)
    if part is None and type(value).__name__ == "_rebuild_wrapper_subclass":
        found.add(damages.NOT_JUDGED, name[:200], "a tensor in parts, of a form that is not known")
    return part


def _read_optimizer(found: Checkpoint, file: TorchFile, rank: int, states: Parts) -> dict[Any, Any]:
    """Check a rank's optimizer, add shards of its moments, and its parts to `states`. Returns the steps."""
    there = torch_optimizers.KEYS & file.value.keys()
    if there != torch_optimizers.KEYS:
        kind = damages.MISSING_STATE if there else damages.NOT_JUDGED
        found.add(kind, file.path.name, torch_optimizers.NO_STATES, shard=f"rank {rank}")
    parts = states.setdefault(rank, {})
    local: dict[Any, dict[Any, Any]] = {}  # with the rank's own part in place of each tensor
    for number, state in states_of(file.value).items():
        local[number] = dict(state)
        for key, value in state.items():
            name = f"state.{number!s:.100}.{key!s:.100}"
            if key != "step" and (part := _part(found, name, value)) is not None:
                parts[name] = part
                local[number][key] = part.tensors[0] if len(part.tensors) == 1 else None
    return torch_optimizers.take(found, file, {**file.value, "state": local}, "state", f"rank {rank}")


def _unlike_steps(files: Mapping[int, TorchFile], steps: Mapping[int, Mapping[Any, Any]]) -> Iterator[Finding]:
    """Ranks that are not at the newest step, or have a parameter at another step than another rank."""
    newest = last_step(step for own in steps.values() for step in own.values())
    first: dict[Any, float] = {}
    for rank, own in steps.items():
        highest = last_step(own.values())
        what = f"step {highest}, others are at {newest}" if highest not in (None, newest) else ""
        for number, step in own.items() if not what else ():
            if settings.is_step(step) and first.setdefault(number, step) != step:
                what = f"parameter {shown(number)} is at step {step:g}, and at {first[number]:g} on another rank"
                break
        if what:
            yield Finding(damages.MIXED_STEPS, files[rank].path.name, what)


def _without_states(files: Mapping[int, TorchFile], weights: Parts, states: Parts, count: int) -> Iterator[Finding]:
    """States that a rank lacks, and others have.

    Where FSDP1 steps the original parameters, a rank has no state of one that it has no elements of: there all ranks
    together have as many elements of a state as a weight has.
    """
    by_name = _by_name(states)
    is_fsdp1 = any(part.cut is True for own in weights.values() for part in own.values())
    if not (is_fsdp1 and any(len({part.size for part in own.values()}) > 1 for own in by_name.values())):
        keys = {
            rank: {(n, str(key)) for n, own in states_of(file.value).items() for key in own if own[key] is not None}
            for rank, file in files.items()
        }
        every = {one for own in keys.values() for one in own}
        for rank, there in keys.items():
            absent = sorted({f"parameter {shown(number)} has no {shown(key)}" for number, key in every - there})
            for what in absent[:MOST_KEYS]:
                yield Finding(damages.CONTRADICTION, files[rank].path.name, f"{what}, and has it on other ranks")
        return
    params = [group.get("params") for file in files.values() for group in groups_of(file.value)]
    named = {str(number) for own in params if isinstance(own, (list, tuple)) for number in own}
    if without := named - {str(number) for file in files.values() for number in states_of(file.value)}:
        detail = f"{len(without)} parameters have no state on any rank, such as {shown(min(without))}"
        yield Finding(damages.UNUSUAL, "optimizer", detail)
    if len(files) == len(weights) == count:
        sizes = {sum(map(_elements, own.values())) for own in _by_name(weights).values()}
        for name, own in by_name.items():
            elements = sum(map(_elements, own.values()))
            if name.endswith(torch_optimizers.OF_ELEMENTS) and elements not in sizes:
                yield Finding(damages.MISSING_STATE, name, f"of {elements} elements, as no weight of the model has")


def _elements(part: Part) -> int:
    """The number of elements that a rank holds."""
    return sum(tensor.numel for tensor in part.tensors)
