"""The model of a ZeRO folder: the ranks' files, the facts of the model files, the slices of each parameter, problems.

What contradicts the other files is a problem in the model, not an error: the audit reports all of them, and the
converter refuses the first.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from ckpt_patches.errors import UserError
from ckpt_patches.formats import tensor_streams, zero, zero_addresses, zero_experts, zero_inventory, zero_keys
from ckpt_patches.formats.checkpoint import WEIGHT, Checkpoint, Extent, Shard, Stream
from ckpt_patches.formats.damages import FRAGMENTS, MIXED_RANKS, NOT_JUDGED, Finding
from ckpt_patches.formats.dtypes import ITEM_SIZE
from ckpt_patches.formats.torch_file import BadFileError, TensorHeader, TorchFile
from ckpt_patches.formats.zero import MASTER, MOMENTUM, ElementType, Folder, Partition, RankFile, Shape, Shares
from ckpt_patches.formats.zero_inventory import ModelFacts
from ckpt_patches.runtime.shown import shown

Wanted = TypeVar("Wanted")
# Keys of a model-states file that the inventory reads, and those of which it reads only the names.
OF_A_MODEL = (
    *zero_keys.OF_THE_MODEL,
    *("iteration", "param_shapes", "frozen_param_shapes", "buffer_names", "shared_params", "num_experts"),
    *zero_experts.AUTOEP,
)
NAMED = ("module", "frozen_param_fragments")
LONGEST = 1000  # characters of a name
FROZEN_PARTS = "frozen_param_fragments."  # prefix of the arrays of frozen parameters at stage 3


class ReadAll(Protocol):
    """How a tool opens files: the results of `wanted` for these files, None for one that cannot be read."""

    def __call__(self, names: Sequence[str], wanted: Callable[[TorchFile], Wanted], /) -> Sequence[Wanted | None]: ...


@dataclass
class Zero:
    """The files of a ZeRO folder that could be read."""

    folder: Folder
    models: dict[tuple[int | None, int], ModelFacts]  # by data-parallel (before stage 3: None), model-parallel rank
    ranks: dict[tuple[int, int], RankFile]  # by data-parallel and model-parallel rank, in the order of the latter
    problems: list[Finding] = field(default_factory=list)
    _degrees: dict[int, int] = field(default_factory=dict)

    @property
    def stage(self) -> int:
        return max((file.stage for file in self.ranks.values()), default=1)

    def of(self, model_rank: int) -> list[RankFile]:
        """The files of a model-parallel rank, in the order of the data-parallel ranks."""
        return [file for (_, own), file in self.ranks.items() if own == model_rank]

    def model(self, model_rank: int) -> Mapping[str, Any]:
        """The content of a model-parallel rank's model file, at stage 3 of its first one; empty without one."""
        found = self.models.get((None, model_rank)) or self.models.get((0, model_rank))
        return found.value if found else {}

    def data_parallel(self, model_rank: int) -> int:
        """The number of data-parallel ranks."""
        if model_rank not in self._degrees:
            counts = (count for file in self.of(model_rank) for count in file.data_parallel)
            ranks = [dp for dp, own in self.folder.optimizer if own == model_rank]
            stated = self.model(model_rank).get("dp_world_size")
            self._degrees[model_rank] = zero_inventory.degree(stated, counts, ranks)
        return self._degrees[model_rank]


def read(folder: Folder, read_all: ReadAll) -> Zero:
    """The model of a folder."""
    complete = {rank: name for rank, name in folder.models.items() if not rank[0]}
    others = {rank: name for rank, name in folder.models.items() if rank[0]}
    models = dict(zip(complete, read_all([*complete.values()], of_model), strict=True))
    first = next((own.value for own in models.values() if own), {})
    changes = read_all([*others.values()], lambda file: unlike(of_model(file), first))
    models |= {rank: own.facts(first) for rank, own in zip(others, changes, strict=True) if own}
    numbers = sorted(folder.optimizer, key=lambda rank: rank[::-1])
    files = read_all([folder.optimizer[rank] for rank in numbers], _rank_file)
    ranks = {rank: own for rank, own in zip(numbers, files, strict=True) if own}
    found = Zero(folder, {rank: own for rank in folder.models if (own := models.get(rank))}, ranks)
    for model_rank in dict.fromkeys(mp for _, mp in ranks):
        _set_addresses(found, model_rank)
    found.problems += zero_inventory.problems(ranks, found.models, found.stage, folder.names, folder.optimizer)
    return found


def _rank_file(file: TorchFile) -> RankFile:
    try:
        return zero.read_rank(file)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise BadFileError(f"{file.path} is not laid out as DeepSpeed does: {type(error).__name__}: {error}") from error


def _set_addresses(found: Zero, model_rank: int) -> None:
    """Set the real addresses in the flat buffers of stages 1 and 2, also in Muon's momentum."""
    own, model = found.of(model_rank), found.model(model_rank)
    is_round_robin = found.stage < 3 and zero_addresses.is_round_robin(model.get("ds_config"))
    if not is_round_robin and not any(partition.momentum for file in own for partition in file.partitions):
        return
    try:
        ranks, where = [file.partitions for file in own], found.folder.path.name
        partitions = zero_addresses.corrected(ranks, shapes_of(model), where, is_round_robin=is_round_robin)
    except (UserError, ValueError, AttributeError, TypeError) as error:
        found.problems.append(Finding(NOT_JUDGED, "all parameters", str(error)))
        return
    for file, fixed in zip(own, partitions, strict=True):
        found.ranks[file.rank, model_rank] = replace(file, partitions=fixed)


def shapes_of(model: Mapping[str, Any]) -> list[dict[str, Shape]]:
    """The shapes of the trained parameters in a model file, by group."""
    return [{name: tuple(shape) for name, shape in group.items()} for group in model.get("param_shapes") or []]


# Slices


class Part(NamedTuple):
    """The elements of a parameter on one data-parallel rank: their partition, the first element there, their number."""

    file: RankFile
    partition: Partition
    name: str
    start: int
    numel: int

    def extent(self, state: str) -> Extent:
        """The bytes of a state; of Muon's momentum all elements of the parameter."""
        flat, start, numel = self.partition.states.get(state), self.start, self.numel
        if flat is None:
            assert self.partition.momentum, state
            flat, (start, numel) = self.partition.momentum, self.partition.wholes[self.name]
        size = ITEM_SIZE[flat.type.dtype]
        return Extent(flat.file, flat.offset + start * size, numel * size)


@dataclass
class Slice:
    """A parameter on one model-parallel rank, and if it is an expert's: on the ranks that share the expert."""

    name: str
    model_rank: int
    sharing: tuple[int, ...]  # the data-parallel ranks that share it
    shape: Shape | None  # None: no file states it
    fragments: list[Part] = field(default_factory=list)  # stages 1 and 2
    equal: tuple["_Group", Shares] | None = None  # stage 3: where the ranks have equal parts

    @property
    def parts(self) -> list[Part]:
        """In the order of the parameter's elements. At stage 3 made when they are asked for: ranks can be thousands."""
        if self.equal is None:
            return self.fragments
        group, share = self.equal
        places = zip(group.files, group.partitions, group.places, strict=True)
        return [Part(file, own, self.name, share.start, share.of(place)) for file, own, place in places]

    def copies(self, state: str) -> list[list[Extent]]:
        """The bytes of a state in the order of the parameter's elements, as often as ranks hold all of it.

        Muon's momentum is in full on each rank with a fragment; all else once.
        """
        parts = [part for part in self.parts if part.numel]
        extents = [part.extent(state) for part in parts]
        if state == MOMENTUM and any(part.partition.momentum for part in parts):
            return [[extent] for extent in extents]
        return [extents]

    @property
    def numel(self) -> int:
        return sum(part.numel for part in self.parts)

    @property
    def is_equal(self) -> bool:
        """Whether the ranks have equal parts, as at stage 3."""
        return self.equal is not None

    @property
    def expert_rank(self) -> int:
        """The expert-parallel rank: with 4 ranks, 2 of them per expert, it is 1 for 1 and 3, or for 2 and 3."""
        first = self.sharing[0]
        return first // len(self.sharing) if first + 1 in self.sharing else first

    @property
    def contradiction(self) -> str:
        """Why the parts are not the parameter of this shape; empty if they are."""
        if self.equal and len(self.equal[0].files) == len(self.sharing):
            return ""
        expected = 0 if self.shape is None else math.prod(self.shape)
        if self.numel != expected:
            why = "a fragment is missing" if self.numel < expected else "fragments overlap"
            return f"{self.numel} elements in all fragments, {expected} in the model's shape: {why}"
        next_rank = dict(itertools.pairwise(sorted(self.sharing)))
        for one, other in itertools.pairwise(part for part in self.parts if part.numel):
            ends = one.start + one.numel >= one.partition.states[MASTER].numel
            if other.start or not ends or other.file.rank != next_rank.get(one.file.rank):
                ranks = f"{one.file.rank} and {other.file.rank}"
                return f"the fragments of data-parallel ranks {ranks} do not follow on one another"
        return ""

    def states(self) -> dict[str, ElementType]:
        """The states that all parts have, the main parameter first, and the type of their elements when merged.

        Raises:
            BadFileError: a rank lacks a state that another one has, or has it in another type.
        """
        if self.equal:
            return self.equal[0].states
        return _states(self.name, [part for part in self.parts if part.numel] or self.parts)


class _Group:
    """Stage 3: a group's partitions on the ranks that share it."""

    def __init__(self, number: int, sharing: tuple[int, ...], files: Sequence[RankFile]) -> None:
        self.number, self.files = number, files
        self.partitions = [file.partitions[number] for file in files]
        self.places = [sharing.index(file.rank) for file in files]  # among those that share it

    @cached_property
    def states(self) -> dict[str, ElementType]:
        parts = zip(self.files, self.partitions, strict=True)
        return _states(f"parameter group {self.number}", [Part(*part, "", 0, 0) for part in parts])


def _states(name: str, parts: Sequence[Part]) -> dict[str, ElementType]:
    """The element type of each state. As with torch.cat, the result requires a gradient if one of the parts does."""
    found = {}
    for key in dict.fromkeys(key for part in parts for key in part.partition.held()):
        flats = []
        for part in parts:
            flat = part.partition.momentum if key == MOMENTUM else None
            flat = flat or part.partition.states.get(key)
            if flat is None:
                raise BadFileError(
                    f"{part.file.path}: expected {shown(key)} of {name}, as other ranks have it, found none"
                )
            if flats and flat.type.dtype != flats[0].type.dtype:
                one, other = parts[0].file.path, part.file.path
                raise BadFileError(f"{one} has {flats[0].type.dtype} where {other} has {flat.type.dtype}")
            flats.append(flat)
        found[key] = ElementType(flats[0].type.dtype, any(flat.type.requires_grad for flat in flats))
    return found


def slices(found: Zero, model_rank: int, shapes: Sequence[Mapping[str, Shape]]) -> tuple[list[Slice], list[Finding]]:
    """The slices of all parameters on one model-parallel rank, and the problems of their fragments.

    Args:
        found: the folder's model.
        model_rank: tensor- and pipeline-parallel.
        shapes: of its parameters, by group.
    """
    own = [file for file in found.of(model_rank) if file.rank < found.data_parallel(model_rank)]
    if not own:
        return [], []
    groups = Counter(name for group in shapes for name in group)
    if twice := [name for name, count in groups.items() if count > 1]:
        return [], [Finding(FRAGMENTS, name, "it is in several groups of param_shapes") for name in twice]
    return _stage_3(found, own, shapes) if found.stage > 2 else _stages_1_and_2(found, own, shapes)


def _stages_1_and_2(
    found: Zero, files: Sequence[RankFile], shapes: Sequence[Mapping[str, Shape]]
) -> tuple[list[Slice], list[Finding]]:
    model_rank = files[0].model_rank
    ranks, neighbours = found.data_parallel(model_rank), zero_experts.shares_with_neighbours(found.model(model_rank))
    every = tuple(range(ranks))
    shape_of = {name: shape for group in shapes for name, shape in group.items()}
    made: dict[tuple[str, tuple[int, ...]], Slice] = {}
    problems: list[Finding] = []
    for file in files:
        for number, partition in enumerate(file.partitions):
            problems += _of_fragments(file, partition)
            sharing = _sharing(file, number, ranks, neighbours=neighbours) or every
            for name, (start, numel) in partition.fragments.items():
                unread = Slice(name, model_rank, sharing, shape_of.get(name))
                made.setdefault((name, sharing), unread).fragments.append(Part(file, partition, name, start, numel))
    with_fragments = {name for name, _ in made}
    if with_fragments:
        problems += [
            Finding(FRAGMENTS, name, "no rank has a fragment of it: a fragment is missing")
            for name, shape in shape_of.items()
            if name not in with_fragments and 0 not in shape
        ]
    return list(made.values()), problems


def _sharing(file: RankFile, group: int, ranks: int, *, neighbours: bool) -> tuple[int, ...]:
    """The data-parallel ranks that share a group with this one, if not all do.

    Neighboring ranks have different experts, unless `neighbours` is set: with 4 ranks, 2 of them per expert,
    ranks 0 and 2 share one.
    """
    counts = file.data_parallel
    if group >= len(counts) or counts[group] == ranks or counts[group] < 1 or ranks % counts[group]:
        return ()
    sharing = zero_experts.ranks_of(ranks, ranks // counts[group], neighbours)
    return next((own for own in sharing if file.rank in own), ())


def _of_fragments(file: RankFile, partition: Partition) -> Iterator[Finding]:
    """Check that fragments lie within the partition and do not overlap."""
    at, last = 0, ""
    for name, (start, numel) in sorted(partition.fragments.items(), key=lambda item: item[1]):
        if start < at:
            detail = f"{file.path.name}: begins at {start}, before the end of {shown(last)} at {at}: fragments overlap"
            yield Finding(FRAGMENTS, name, detail)
        at, last = max(at, start + numel), name
    if at > partition.numel:
        yield Finding(FRAGMENTS, last, f"{file.path.name}: ends at {at}, the partition at {partition.numel}")


def _stage_3(
    found: Zero, files: Sequence[RankFile], shapes: Sequence[Mapping[str, Shape]]
) -> tuple[list[Slice], list[Finding]]:
    """No slices if a file contradicts the model's. Ranks with other experts have a model file with other shapes."""
    every = tuple(range(found.data_parallel(files[0].model_rank)))
    made: dict[tuple[int, tuple[int, ...]], list[RankFile]] = {}
    of_rank = {file.rank: _own_shapes(found, file, shapes) for file in files}
    for file in files:
        if (groups := len(of_rank[file.rank])) != len(file.partitions):
            detail = f"{file.path.name}: {len(file.partitions)} groups, {groups} in the model's file"
            return [], [Finding(FRAGMENTS, "all parameters", detail)]
        for number, group in enumerate(of_rank[file.rank]):
            sharing = next(iter(file.sharing[number : number + 1]), ()) or every
            if problem := _contradiction(file, number, group, sharing):
                return [], [problem]
            made.setdefault((number, sharing), []).append(file)
    result = []
    for (number, sharing), own in made.items():
        held, shape_of = _Group(number, sharing, own), of_rank[own[0].rank][number]
        for name, share in zero.shares(shape_of, len(sharing)):
            result.append(Slice(name, own[0].model_rank, sharing, shape_of[name], equal=(held, share)))
    return result, []


def _own_shapes(found: Zero, file: RankFile, shapes: Sequence[Mapping[str, Shape]]) -> Sequence[Mapping[str, Shape]]:
    model = found.models.get((file.rank, file.model_rank))
    return shapes_of(model.value) if model and model.value.get(zero_experts.AUTOEP[0]) else shapes


def _contradiction(file: RankFile, number: int, group: Mapping[str, Shape], sharing: tuple[int, ...]) -> Finding | None:
    """The problem if a rank's partition of a group does not fit the shapes of the group's parameters."""
    name, partitions = file.path.name, file.partitions
    if file.rank not in sharing:
        detail = f"{name}: of group {number}, which ranks {', '.join(map(str, sharing))} share"
        return Finding(MIXED_RANKS, name, detail)
    expected = sum(share.each for _, share in zero.shares(group, len(sharing)))
    if partitions[number].numel != expected:
        detail = f"{name}: {partitions[number].numel} elements, {expected} by the model's shapes"
        return Finding(FRAGMENTS, f"all parameters of group {number}", detail)
    return None


# Model files


class Unlike(NamedTuple):
    """The differences of a model-states file from another one. There are many files, which are nearly equal."""

    name: str
    root: str
    changed: dict[str, Any]
    absent: tuple[str, ...]

    def facts(self, first: Mapping[str, Any]) -> ModelFacts:
        """The file's facts. `first` is the content of the other file."""
        value = {**_looked_at(first), **self.changed}
        return ModelFacts(self.name, {key: value[key] for key in value.keys() - {*self.absent}}, self.root)


def unlike(facts: ModelFacts, first: Mapping[str, Any]) -> Unlike:
    own, other = _looked_at(facts.value), _looked_at(first)
    changed = {key: value for key, value in own.items() if key not in other or value != other[key]}
    return Unlike(facts.name, facts.root, changed, tuple(other.keys() - own.keys()))


def _looked_at(value: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value[key] for key in (*OF_A_MODEL, *NAMED) if key in value}
    return found | {key: dict.fromkeys(own) for key in NAMED if isinstance(own := found.get(key), Mapping)}


def of_model(file: TorchFile) -> ModelFacts:
    """The facts in a model-states file.

    Raises:
        BadFileError: it does not hold a dict, or has no shapes as `param_shapes`.
    """
    if not isinstance(file.value, dict):
        raise BadFileError(f"{file.path}: expected a dict in it, found {type(file.value).__name__}")
    return ModelFacts(file.path.name, model_states(file.path, file.value), file.root)


def model_states(path: Path, value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content of a model-states file, with the weights by the names that `param_shapes` has.

    Raises:
        BadFileError: it has no shapes as `param_shapes`.
    """
    _check_shapes(path, value)
    module, buffers = value.get("module"), value.get("buffer_names")
    if not isinstance(module, Mapping):
        return value
    weights = _flat(module)
    if isinstance(buffers, list) and weights.keys() != module.keys():  # a model that nests them selects the buffers
        buffers = [name for name in buffers if not isinstance(name, str) or name in weights]
    return {**value, "module": weights, **({"buffer_names": buffers} if "buffer_names" in value else {})}


def _flat(module: Mapping[Any, Any]) -> dict[Any, Any]:
    """The weights by name. Megatron-DeepSpeed's models nest them; the extra state of a module can be a dict."""
    found: dict[Any, Any] = {}
    seen, left = {id(module)}, list[tuple[Any, Mapping[Any, Any]]]([("", module)])
    for prefix, inner in left:
        for key, value in inner.items():
            name = f"{prefix}.{key}" if prefix else key
            is_long = id(value) in seen or len(str(name)) > LONGEST  # a file can name one dict, or use one key, often
            if isinstance(value, Mapping) and not is_long and not str(name).endswith("_extra_state"):
                seen.add(id(value))
                left.append((name, value))
            else:
                found[name] = value
    return found


def _check_shapes(path: Path, model: Mapping[str, Any]) -> None:
    """Check that the shapes of trained and frozen parameters in a model-states file are dicts of shapes.

    Raises:
        BadFileError: they are something else.
    """
    groups, frozen = model.get("param_shapes") or (), model.get("frozen_param_shapes") or {}
    if not isinstance(groups, (list, tuple)) or not all(map(_are_shapes, groups)):
        raise BadFileError(f"{path}: expected the shapes of parameters as param_shapes, found {shown(groups)}")
    if not _are_shapes(frozen):
        raise BadFileError(f"{path}: expected shapes of parameters as frozen_param_shapes, found {shown(frozen)}")


def _are_shapes(group: Any) -> bool:
    return isinstance(group, dict) and all(
        isinstance(name, str) and isinstance(shape, (list, tuple)) and all(type(n) is int and n >= 0 for n in shape)
        for name, shape in group.items()
    )


def add_frozen_parts(found: Checkpoint, model: ModelFacts, rank: int, ranks: int | None) -> None:
    """Add a shard for each part of a frozen parameter in the model file of `rank` of `ranks`, without its padding.

    DeepSpeed allocates the padding with torch.empty, so it can hold NaN.
    """
    path = found.path / model.name
    shapes, fragments = model.value.get("frozen_param_shapes"), model.value.get("frozen_param_fragments")
    if not isinstance(shapes, Mapping) or not isinstance(fragments, Mapping) or not ranks:
        return
    for name, share in zero.shares(shapes, ranks):
        part = fragments.get(name)
        # MiCS shards a parameter over fewer ranks: then all elements are checked, as in an unknown tensor.
        if not isinstance(part, TensorHeader) or part.numel != share.each:
            continue
        own = share.of(rank)
        array = f"{FROZEN_PARTS}{name}"
        stream = tensor_streams.stream(found, path, array, part)
        if stream is None:
            continue
        found.padded.append(stream.extents[0])
        if own:
            extent = Extent(str(path), part.offset, own * ITEM_SIZE[part.dtype])
            streams = {WEIGHT: Stream(array, part.dtype, (extent,))}
            found.shards.append(Shard(array, path.name, (own,), streams, begin=(rank * share.each,)))
