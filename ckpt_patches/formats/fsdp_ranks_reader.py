"""Reader for checkpoints of FSDP runs with one torch.save file per rank, as verl writes them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt_patches.formats import (
    damages,
    fsdp_ranks,
    optimizer_inventory,
    settings,
    tensor_streams,
    zero_inventory,
    zero_keys,
)
from ckpt_patches.formats.checkpoint import ALONE, MOMENTS, VOCABULARY, WEIGHT, Checkpoint, Shard
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.dcp_reader import set_step
from ckpt_patches.formats.fsdp_ranks import CONFIG, KINDS, MODEL, OPTIMIZER, Part
from ckpt_patches.formats.ranged import read_metadata
from ckpt_patches.formats.tensor_streams import groups_of
from ckpt_patches.formats.torch_file import TensorHeader, TorchFile
from ckpt_patches.runtime.shown import shown

FORMAT, WEIGHTS_ALONE = "fsdp, a file for each rank", f"fsdp, a file for each rank{ALONE}"
MOST_KEYS = 5  # contradictions reported per file


def is_fsdp_ranks(path: Path) -> bool:
    """Whether a folder contains a rank's file."""
    return any(fsdp_ranks.named(entry.name) for entry in path.iterdir())


@dataclass(frozen=True)
class _Ranks:
    """The readable files of one save."""

    count: int
    files: dict[str, dict[int, TorchFile]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    parts: dict[str, dict[int, dict[str, Part]]] = field(default_factory=lambda: {MODEL: {}, OPTIMIZER: {}})

    @property
    def is_fsdp1(self) -> bool:
        return any(part.every for own in self.parts[MODEL].values() for part in own.values())

    def with_every_rank(self, kind: str) -> Iterator[tuple[str, dict[int, Part]]]:
        """Each tensor with a known part on every rank, and these parts. Empty if a rank's file is missing."""
        own = self.parts[kind]
        if len(own) == self.count:
            for name in own[0]:
                if all(name in parts for parts in own.values()):
                    yield name, {rank: parts[name] for rank, parts in sorted(own.items())}


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint, with findings for the problems of its files."""
    found = Checkpoint(path, FORMAT)
    ranks = _read_files(found)
    for kind, own in ranks.files.items():
        found.findings += _unlike(kind, own)
    _read_weights(found, ranks)
    set_step(found, _read_optimizers(found, ranks), path.name, path.parent.name)
    for kind in ranks.parts:
        for name, parts in ranks.with_every_rank(kind):
            found.findings += [Finding(damages.FRAGMENTS, name, detail=why) for why in fsdp_ranks.untiled(parts)]
    found.findings += _uncounted(ranks)
    if not any(shard.streams.keys() & {*MOMENTS} for shard in found.shards):
        found.format = FORMAT if ranks.files[OPTIMIZER] else WEIGHTS_ALONE
    return found


def _read_files(found: Checkpoint) -> _Ranks:
    """Read all files of the newest save. Files for another number of ranks are older; a load ignores them."""
    every = {entry.name: own for entry in sorted(found.path.iterdir()) if (own := fsdp_ranks.named(entry.name))}
    config = _world_size(found)
    ranks = _Ranks(fsdp_ranks.stated(every.values(), config))
    if config not in (None, ranks.count):
        detail = f"it states {config} ranks, and the names of the files {ranks.count}"
        found.findings.append(Finding(damages.CONTRADICTION, CONFIG, detail=detail))
    there: dict[str, set[int]] = defaultdict(set)
    for name, (kind, count, rank) in every.items():
        if count != ranks.count:
            detail = f"a rank's file of a save of {count} ranks, beside one of {ranks.count}"
            found.findings.append(Finding(damages.UNUSUAL, name, detail=detail))
            tensor_streams.read(found.path / name, found)
            continue
        there[kind].add(rank)
        file = tensor_streams.read_file(found.path / name, found)
        if file is not None:
            _take(found, ranks, name, file)
    problems = [
        problem
        for kind in KINDS
        if kind in there or kind == MODEL
        for problem in zero_inventory.absent_ranks(there[kind], ranks.count, KINDS[kind])
    ]
    found.findings += tensor_streams.findings(problems)
    return ranks


def _world_size(found: Checkpoint) -> int | None:
    try:
        size = fsdp_ranks.world_size(read_metadata(found.path / CONFIG))
    except FileNotFoundError:
        return None
    except OSError:
        size = None
    if size is None:
        found.findings.append(Finding(damages.BAD_METADATA, CONFIG, detail="it states no number of ranks"))
    return size


def _take(found: Checkpoint, ranks: _Ranks, name: str, file: TorchFile) -> None:
    """Check a file and add it to `ranks`. torch.save names the root folder in the archive after the file."""
    own = fsdp_ranks.named(name)
    assert own
    written_as = f"{file.root}.pt"
    if fsdp_ranks.named(written_as) not in (None, own):
        detail = f"it was written as {written_as}"
        found.findings.append(Finding(damages.FOREIGN_FILE, name, detail=detail))
    if own.rank >= ranks.count:
        found.findings.append(Finding(damages.FOREIGN_FILE, name, detail=f"of {ranks.count} ranks"))
    elif not isinstance(file.value, dict):
        detail = f"expected a dict, found {shown(type(file.value).__name__)}"
        found.findings.append(Finding(damages.CONTRADICTION, name, detail=detail))
    else:
        ranks.files[own.kind][own.rank] = file


def _unlike(kind: str, files: Mapping[int, TorchFile]) -> Iterator[Finding]:
    """Differences between the ranks' files. One program writes them, so keys and plain values must be the same."""
    keys = {rank: zero_keys.keys_of(file.value) for rank, file in files.items()}
    usual = zero_keys.usual(keys.values())
    for rank, own in keys.items():
        for what in list(zero_keys.contradictions(own, usual))[:MOST_KEYS]:
            yield Finding(damages.CONTRADICTION, files[rank].path.name, detail=what)
    if kind == OPTIMIZER and files:
        first, *others = (files[rank] for rank in sorted(files))
        for other in others:
            for number, (its, expected) in enumerate(zip(groups_of(other.value), groups_of(first.value), strict=False)):
                for what in _differences(its, expected):
                    detail = f"group {number}: {what} in {first.path.name}"
                    yield Finding(damages.CONTRADICTION, other.path.name, detail=detail)


def _differences(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The differences of one group between two ranks, including its parameters."""
    found = list(settings.differences(own, other))
    return found if own.get("params") == other.get("params") else [*found, "its parameters are others than those"]


def _read_weights(found: Checkpoint, ranks: _Ranks) -> None:
    for rank, file in sorted(ranks.files[MODEL].items()):
        if not file.value:
            found.findings.append(Finding(damages.MISSING_WEIGHT, file.path.name, detail="it holds no weight"))
        parts = ranks.parts[MODEL].setdefault(rank, {})
        for name, value in file.value.items():
            part = _part(found, f"{name!s:.200}", value)
            if part is not None:
                parts[str(name)] = part
                found.shards += _of_weight(found, file, rank, str(name), part)


def _part(found: Checkpoint, name: str, value: Any) -> Part | None:
    """A rank's part of a tensor; None for any other value. A tensor of an unknown form adds a finding."""
    part = fsdp_ranks.part_of(value)
    kind = type(value).__name__
    if part is None and kind == "_rebuild_wrapper_subclass":
        found.findings.append(
            Finding(damages.NOT_JUDGED, name, detail="a tensor in parts, of a form that is not known")
        )
    return part


def _of_weight(found: Checkpoint, file: TorchFile, rank: int, name: str, part: Part) -> Iterator[Shard]:
    for number, tensor in enumerate(part.tensors):
        stream = tensor_streams.stream(found, file.path, name, tensor)
        if stream is not None and stream.numel:
            label = f"rank {rank}" + (f", part {number}" if number else "")
            yield Shard(name, label, tensor.shape, {WEIGHT: stream})


def _read_optimizers(found: Checkpoint, ranks: _Ranks) -> list[Any]:
    """Check the optimizer files and add shards of their moments. Returns the steps that the files state."""
    files = dict(sorted(ranks.files[OPTIMIZER].items()))
    states = {rank: tensor_streams.states_of(file.value) for rank, file in files.items()}
    steps = {rank: _steps(file, states[rank]) for rank, file in files.items()}
    every = {number for own in states.values() for number in own}
    tokens = _vocabularies(ranks)
    local = {rank: {n: _local(found, ranks, rank, n, s) for n, s in own.items()} for rank, own in states.items()}
    is_uneven = ranks.is_fsdp1 and _is_uneven(ranks)
    for rank, file in files.items():
        own = local[rank]
        elsewhere = every - own.keys() if is_uneven else set()
        found.findings += _of_optimizer(file, own, steps[rank], elsewhere, f"rank {rank}")
        for number, state in own.items():
            parts = ranks.parts[OPTIMIZER].get(rank, {})
            known = {role: parts[array] for role in MOMENTS if (array := f"state.{number}.{role}") in parts}
            found.shards += _of_moments(found, file, rank, number, state, known, tokens)
        found.groups = found.groups or groups_of(file.value)
    found.findings += _between(files, {} if ranks.is_fsdp1 else states, steps)
    return [step for own in steps.values() for step in own.values()]


def _is_uneven(ranks: _Ranks) -> bool:
    """Whether FSDP1 sharded a buffer whose parameters the optimizer steps one by one (`use_orig_params`).

    Then a rank has no state for a parameter without elements on that rank. Otherwise all its parts have one size.
    """
    sizes: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for own in ranks.parts[OPTIMIZER].values():
        for name, part in own.items():
            sizes[name].add(part.size)
    return any(len(own) > 1 for own in sizes.values())


def _uncounted(ranks: _Ranks) -> Iterator[Finding]:
    """Findings for parameters of such an optimizer whose element count over all ranks matches no weight."""
    weights = {name: parts for name, parts in ranks.with_every_rank(MODEL) if all(p.every for p in parts.values())}
    if not weights or not _is_uneven(ranks) or len(ranks.files[OPTIMIZER]) < ranks.count:
        return
    known = {sum(tensor.numel for p in parts.values() for tensor in p.tensors) for parts in weights.values()}
    counts: dict[str, int] = defaultdict(int)
    for own in ranks.parts[OPTIMIZER].values():
        for name, part in own.items():
            counts[name] += part.tensors[0].numel
    for name, count in counts.items():
        if name.endswith(optimizer_inventory.OF_ELEMENTS) and count not in known:
            detail = f"ranks hold {count} elements, and no weight of the model has as many"
            yield Finding(damages.MISSING_STATE, name, detail=detail)


def _steps(file: TorchFile, states: Mapping[Any, Mapping[Any, Any]]) -> dict[Any, Any]:
    steps = tensor_streams.steps_of(file.path, states)
    return {number: step for number, step in steps.items() if step is not None}


def _local(found: Checkpoint, ranks: _Ranks, rank: int, number: Any, state: Mapping[Any, Any]) -> dict[Any, Any]:
    """A parameter's states with the rank's part in place of each tensor. Adds the parts to `ranks`."""
    own = dict(state)
    for name, value in state.items():
        array = f"state.{number!s:.100}.{name!s:.100}"
        part = _part(found, array, value)
        if part is not None and name != "step":
            ranks.parts[OPTIMIZER].setdefault(rank, {})[array] = part
            own[name] = part.tensors[0] if len(part.tensors) == 1 else None
    return own


def _of_optimizer(
    file: TorchFile, states: dict[Any, dict[Any, Any]], steps: dict[Any, Any], elsewhere: set[Any], label: str
) -> list[Finding]:
    """Check the consistency of one rank's file. Parameters in `elsewhere` need no state."""
    for key in ("state", "param_groups"):
        if key not in file.value and not {*file.value} & {"state", "param_groups"}:
            detail = "neither state nor param_groups, as a torch optimizer's state dict has them"
            return [Finding(damages.NOT_JUDGED, file.path.name, label, detail=detail)]
        if key not in file.value:
            return [Finding(damages.MISSING_STATE, file.path.name, label, detail=f"no {key}")]
    groups = [{**group, "params": _without(group.get("params"), elsewhere)} for group in groups_of(file.value)]
    own = tensor_streams.of_optimizer(file, groups, states, steps, label)
    # Each rank has the states of all parameters, or of its own: one without states has lost them, or is frozen.
    return [replace(f, kind=damages.UNUSUAL) if f.kind is damages.RARE else f for f in own]


def _without(params: Any, elsewhere: set[Any]) -> Any:
    if not elsewhere or not isinstance(params, (list, tuple)):
        return params
    return [param for param in params if not (isinstance(param, (int, str)) and param in elsewhere)]


def _between(
    files: Mapping[int, TorchFile],
    states: Mapping[int, Mapping[Any, Mapping[Any, Any]]],
    steps: Mapping[int, Mapping[Any, Any]],
) -> Iterator[Finding]:
    """Check that states and steps agree between ranks."""
    counted = {rank: {n: step for n, step in own.items() if settings.is_step(step)} for rank, own in steps.items()}
    for kind, unlike in (
        (damages.CONTRADICTION, fsdp_ranks.unlike_keys(states)),
        (damages.MIXED_STEPS, fsdp_ranks.unlike_steps(counted)),
    ):
        for rank, what in unlike:
            yield Finding(kind, files[rank].path.name, detail=what)


def _vocabularies(ranks: _Ranks) -> dict[tuple[int, ...], str]:
    """Weights whose rows are tokens, by shape. In a state of this shape, many rows may never have a gradient."""
    parts: Iterable[tuple[str, Part]] = (item for own in ranks.parts[MODEL].values() for item in own.items())
    return {part.size: name for name, part in parts if any(word in name for word in VOCABULARY)}


def _of_moments(
    found: Checkpoint,
    file: TorchFile,
    rank: int,
    number: Any,
    state: Mapping[Any, Any],
    parts: Mapping[str, Part],
    tokens: Mapping[tuple[int, ...], str],
) -> Iterator[Shard]:
    """The moments of a parameter on one rank. A plain 1-D tensor may be a flat buffer of unknown layout."""
    streams = tensor_streams.streams(found, file.path, f"state.{number!s:.100}", {role: state[role] for role in parts})
    headers = [state[role] for role in streams]
    if not headers or len({header.shape for header in headers}) > 1 or not headers[0].numel:
        return
    (size, *_), header = {part.size for part in parts.values()}, headers[0]
    assert isinstance(header, TensorHeader)
    like = f" of the shape of {tokens[size]}" if size in tokens else ""
    is_flat = len(size) == 1 and all(part.is_plain for part in parts.values())
    name = f"parameter {number!s:.100}{like}"
    yield Shard(name, f"rank {rank}", header.shape, streams, has_rows=not is_flat, has_zero_padding=is_flat)
