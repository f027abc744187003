"""Reader for DeepSpeed's ZeRO checkpoints: each parameter's elements on all ranks, and the problems of the files."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt_patches.errors import UserError
from ckpt_patches.formats import (
    damages,
    frozen_parts,
    tensor_streams,
    zero,
    zero_addresses,
    zero_experts,
    zero_facts,
    zero_inventory,
    zero_pipeline,
)
from ckpt_patches.formats.checkpoint import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    WEIGHT,
    Checkpoint,
    Copies,
    Extent,
    Shard,
    Stream,
    first_beta,
    last_step,
)
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.dtypes import ITEM_SIZE
from ckpt_patches.formats.torch_file import TensorHeader
from ckpt_patches.formats.zero import Flat, Partition, RankState, Shape
from ckpt_patches.formats.zero_facts import numel_of
from ckpt_patches.formats.zero_inventory import ModelFacts, Models, RankFacts

# Keys that DeepSpeed itself saves with the model. Others are the user's, or a newer release's.
OF_THE_ENGINE = """
module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler
data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps global_samples dp_world_size mp_world_size
ds_config ds_version universal_checkpoint_info
"""

EXPERT_RANK = "expert-parallel rank "  # prefix of a label
Key = tuple[str, str]  # parameter name; label of the expert-parallel rank, empty if the parameter is not an expert's
STATES = {MASTER: zero.MASTER, EXP_AVG: "exp_avg", EXP_AVG_SQ: "exp_avg_sq"}


def is_zero(path: Path) -> bool:
    return bool(zero.look(path).optimizer)


@dataclass(frozen=True)
class RankFile:
    """A rank's file and its contents."""

    path: Path
    rank: int
    state: RankState
    facts: RankFacts

    @property
    def step(self) -> int | None:
        own = [partition.step.number for partition in self.state.partitions if partition.step]
        return last_step([*own, *(group.get("step") for group in self.state.settings if isinstance(group, dict))])


@dataclass(frozen=True)
class OnRank:
    """A parameter's elements on one rank: their partition, the first element there, and their number."""

    file: RankFile
    partition: Partition
    start: int
    numel: int


@dataclass
class Parameter:
    """The places of a parameter's elements, in order."""

    shape: Shape
    ranks: list[OnRank] = field(default_factory=list)
    shape_is_known: bool = True


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint, with findings for the problems of its files."""
    found = Checkpoint(path, "deepspeed zero", knows_trained=True)
    folder = zero.look(path)
    models = {rank: own for rank, name in folder.models.items() if (own := _model_file(found, path / name))}
    weights = _Weights(found, folder, models)
    ranks: dict[tuple[int, int], RankFacts] = {}
    stages = set()
    for model_rank in sorted({mp for _, mp in folder.optimizer}):
        for file in _read_model_rank(found, folder, model_rank, models, weights):
            ranks[file.rank, model_rank] = file.facts
            stages.add(file.state.stage)
        for (dp, mp), model in models.items():
            if mp == model_rank and dp is not None:
                frozen_parts.add(found, model, dp, found.data_parallel)
    found.findings += tensor_streams.findings(
        [
            *zero_inventory.problems(ranks, models, max(stages, default=1), folder.names, folder.optimizer),
            *zero_inventory.other_step(path.name, models.values()),
        ]
    )
    for name in folder.names:  # experts, model files of other stage 3 ranks
        if name.endswith(".pt") and name not in found.read:
            tensor_streams.read(path / name, found)
    return found


def _model_file(found: Checkpoint, path: Path) -> ModelFacts | None:
    file = tensor_streams.read_file(path, found)
    if file is None or not isinstance(file.value, dict):
        return None
    return zero_facts.of_model(file)


def _read_model_rank(
    found: Checkpoint,
    folder: zero.Folder,
    model_rank: int,
    models: Models,
    weights: "_Weights",
) -> list[RankFile]:
    """Add the shards of one model-parallel rank. Returns its files."""
    names = {dp: name for (dp, mp), name in sorted(folder.optimizer.items()) if mp == model_rank}
    model = models.get((None, model_rank)) or models.get((0, model_rank))
    info: Mapping[str, Any] = model.value if model else {}
    files = [file for rank, name in names.items() if (file := _rank_file(found, rank, folder.path / name))]
    if not files:
        return []
    files = _in_written_order(found, files, info)
    _set_run(found, files, names, info)
    _check_paddings(found, files)
    if files[0].state.stage > 2 and not folder.experts:  # with experts, only the first rank saves the rest of the model
        _check_model_files(found, folder, model_rank, names.keys(), info)
    label = f"mp_rank_{model_rank:02d}" if len(info) and info.get("mp_world_size", 1) > 1 else ""
    stage = files[0].state.stage
    stated = _shapes(info)
    trained = {name for file in files for partition in file.state.partitions for name in partition.fragments}
    shapes = stated or _shapes_of_weights(info, trained) or weights.shapes_in_layers(trained, model_rank)
    parameters = (
        _stage3(found, files, shapes)
        if stage > 2
        else _stage12(found, files, shapes, zero_experts.shares_with_neighbours(info))
    )
    found.padded += _partitions(files, parameters)
    experts = {(match[1], match[2]) for name, _ in parameters if (match := zero_experts.LOCAL.fullmatch(name))}
    local = Counter(layer for layer, _ in experts)
    for (name, of_experts), parameter in parameters.items():
        numel, expected = sum(part.numel for part in parameter.ranks), math.prod(parameter.shape)
        where = ", ".join(filter(None, (label, of_experts)))  # expert-parallel ranks use one name for different experts
        is_known = bool(of_experts) or parameter.shape_is_known
        if not is_known and (zero_inventory.is_expert(name) or not stated):
            found.findings.append(Finding(damages.NOT_JUDGED, name, where, detail="no file has its shape"))
        elif numel != expected:
            kind = damages.NOT_JUDGED if of_experts else damages.FRAGMENTS
            what = "the fragments of an expert" if of_experts else "all fragments"
            detail = f"{numel} elements in {what}, {expected} in the model's shape"
            found.findings.append(Finding(kind, name, where, detail=detail))
        else:
            streams = _streams(name, parameter)
            if stage < 3 and of_experts:
                streams |= weights.of_expert(name, of_experts, model_rank, local, parameter.shape)
            elif stage < 3:  # at stage 3 a rank has only a part
                streams |= weights.of(name, model_rank, parameter.shape)
            found.shards.append(Shard(name, where, parameter.shape, streams))
        found.shards += _further(name, label, parameter)
    return files


class _Weights:
    """The model's weights at stages 1 and 2, from the model's file, or from the layers' files of a pipeline."""

    def __init__(self, found: Checkpoint, folder: zero.Folder, models: Models) -> None:
        self.found, self.folder, self.models = found, folder, models
        names = zero_pipeline.layer_files(folder.names).values()
        self.layers = {name: tensor_streams.read(folder.path / name, found) for name in names}
        self.experts: dict[tuple[str, str], tuple[str, Any]] = {}  # by parameter and file name suffix
        for name in folder.experts:
            values = tensor_streams.read(folder.path / name, found)
            for key, value in values.items() if isinstance(values, Mapping) else ():
                self.experts[key, "".join(name.partition("_mp_rank_")[1:])] = (name, value)
        self.places: dict[tuple[str, int], zero_pipeline.Place] = {}  # by parameter and model-parallel rank
        if self.layers:
            self._set_places()

    def _set_places(self) -> None:
        of_pipeline = {
            mp: model.value
            for (_, mp), model in self.models.items()
            if not isinstance(model.value.get("module"), Mapping)
        }
        numbered = set()
        for mp, info in of_pipeline.items():
            frozen = info.get("frozen_param_shapes")
            shapes = {**zero_inventory.shapes_by_name(info), **(frozen if isinstance(frozen, Mapping) else {})}
            for name, place in zero_pipeline.places(shapes, self.layers, mp).items():
                self.places[name, mp] = place
                numbered.add(place.file)
        for mp, info in of_pipeline.items():
            shapes = zero_inventory.shapes_by_name(info)
            for name, tied in zero_pipeline.tied_places(shapes, self.layers, numbered, mp):
                if not tied:
                    detail = "no file of a layer has the weights of this module"
                    label = f"mp_rank_{mp:02d}"
                    self.found.findings.append(Finding(damages.MISSING_WEIGHT, name, label, detail=detail))
                elif len(tied) == 1:  # several that look the same are ambiguous
                    self.places[name, mp] = tied[0]

    def of(self, name: str, model_rank: int, shape: Shape) -> dict[str, Stream]:
        """A parameter's weight, by role; empty if it cannot be determined."""
        model = self.models.get((None, model_rank)) or self.models.get((0, model_rank))
        module = model.value.get("module") if model else None
        place = self.places.get((name, model_rank))
        if model and isinstance(module, dict):
            path, value = self.folder.path / model.name, module.get(name)
        elif place and isinstance(self.layers.get(place.file), Mapping):
            path, value = self.folder.path / place.file, self._in_layer(name, place)
        else:
            return {}
        if value is None and zero_inventory.is_expert(name):
            return self.of_expert(name, "", model_rank, {}, shape)
        own = tensor_streams.weight(self.found, path, name, value, shape)
        return {WEIGHT: own} if own else {}

    def shapes_in_layers(self, trained: Iterable[str], model_rank: int) -> list[dict[str, Shape]]:
        """Of the trained parameters of a pipeline: without ZeRO no file of its model states them."""
        places = zero_pipeline.places(dict.fromkeys(trained, ()), self.layers, model_rank)
        held = {name: (self.layers.get(place.file) or {}).get(place.key) for name, place in places.items()}
        return [{name: tuple(weight.shape) for name, weight in held.items() if isinstance(weight, TensorHeader)}]

    def of_expert(
        self, name: str, label: str, model_rank: int, local: Mapping[str, int], shape: Shape
    ) -> dict[str, Stream]:
        """An expert's weight, by role. `local` is each layer's number of experts per rank, numbered from 0."""
        match = zero_experts.LOCAL.fullmatch(name)
        if not match:
            return {}
        first = int(label.removeprefix(EXPERT_RANK)) * local[match[1]] if label else 0
        own = f"{match[1]}{first + int(match[2])}{match[3]}"
        file, value = self.experts.get((own, f"_mp_rank_{model_rank:02d}_model_states.pt"), ("", None))
        found = tensor_streams.weight(self.found, self.folder.path / file, own, value, shape) if file else None
        return {WEIGHT: found} if found else {}

    def _in_layer(self, name: str, place: zero_pipeline.Place) -> Any:
        value = self.layers[place.file].get(place.key)
        if value is None and not zero_inventory.is_expert(name):
            finding = Finding(damages.MISSING_WEIGHT, place.file, detail=f"no weight of {name:.100}")
            self.found.findings.append(finding)
        return value


def _shapes(info: Mapping[str, Any]) -> list[dict[str, Shape]]:
    """The shapes of the trained parameters, by group."""
    return [{name: tuple(shape) for name, shape in group.items()} for group in info.get("param_shapes") or []]


def _shapes_of_weights(info: Mapping[str, Any], trained: Set[str]) -> list[dict[str, Shape]]:
    """The shapes of trained parameters, from their weights. With experts, older releases save no `param_shapes`."""
    if not any(map(zero_inventory.is_expert, trained)):
        return []
    module = info.get("module")
    weights = module.items() if isinstance(module, Mapping) else ()
    return [{name: tuple(w.shape) for name, w in weights if name in trained and isinstance(w, TensorHeader)}]


def _in_written_order(found: Checkpoint, files: list[RankFile], info: Mapping[str, Any]) -> list[RankFile]:
    """The files, with the real offsets in the buffers if the run used `round_robin_gradients`."""
    if files[0].state.stage > 2 or not zero_addresses.is_round_robin(info.get("ds_config")):
        return files
    own = sorted(files, key=lambda file: file.rank)
    try:
        shapes = _shapes(info)
        fixed = zero_addresses.in_written_order([file.state.partitions for file in own], shapes, found.path.name)
    except (UserError, ValueError, AttributeError, TypeError) as error:
        found.findings.append(Finding(damages.NOT_JUDGED, "all parameters", detail=str(error)))
        return files
    states = [replace(file.state, partitions=partitions) for file, partitions in zip(own, fixed, strict=True)]
    return [replace(file, state=state) for file, state in zip(own, states, strict=True)]


def _partitions(files: list[RankFile], parameters: dict[Key, Parameter]) -> Iterator[Extent]:
    """The byte ranges of groups that hold parameters. Bytes outside the parameters are padding with any value."""
    used = {id(part.partition) for parameter in parameters.values() for part in parameter.ranks}
    groups = {n for file in files for n, partition in enumerate(file.state.partitions) if id(partition) in used}
    for file in files:
        for number, partition in enumerate(file.state.partitions):
            for flat in partition.states.values() if number in groups else ():
                yield Extent(str(file.path), flat.offset, flat.numel * ITEM_SIZE[flat.type.dtype])


def _rank_file(found: Checkpoint, rank: int, path: Path) -> RankFile | None:
    """Read a rank's file; None, and a finding, if it is damaged."""
    file = tensor_streams.read_file(path, found)
    if file is None:
        return None
    try:
        optimizer = zero.required(file.value, zero.OPTIMIZER_STATE, path)
        state = zero.read_rank(path, rank, optimizer)
        return RankFile(path, rank, state, zero_facts.of_rank(file, optimizer, state))
    except UserError as error:
        found.findings.append(tensor_streams.refused(error, path.name))
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        detail = f"not as DeepSpeed writes it: {type(error).__name__}: {error}"
        found.findings.append(Finding(damages.BAD_FILE, path.name, detail=detail))
    return None


def _set_run(found: Checkpoint, files: list[RankFile], ranks: Iterable[int], info: Mapping[str, Any]) -> None:
    """Set the facts about the run that the files of one model-parallel rank state."""
    counts = (count for file in files for count in file.state.data_parallel)
    found.data_parallel = zero_inventory.degree(info.get("dp_world_size"), counts, ranks)
    steps = {file.step for file in files if file.step is not None}
    # SGD and Lion store no step; an optimizer that never stepped stores no state.
    found.step = max(steps, default=None if any(file.state.states for file in files) else 0)
    found.groups = [group for group in files[0].state.settings if isinstance(group, dict)]
    found.beta1 = first_beta(found.groups)


def _check_model_files(
    found: Checkpoint, folder: zero.Folder, model_rank: int, ranks: Iterable[int], info: Mapping[str, Any]
) -> None:
    """Check that each rank has a model file, since at stage 3 it loads its own."""
    there = {dp: name for (dp, mp), name in folder.zero3_models().items() if mp == model_rank}
    missing = sorted(set(ranks) - there.keys())
    if not missing:
        return
    if there.keys() == {0} and info and _may_have_loaded_universal(info):
        names = tuple(zero.model_name(rank, model_rank) for rank in missing)
        found.copies.append(Copies(there[0], names, _what_can_differ(info), _frozen(info)))
        detail = "; ".join(filter(None, (f"{len(missing)} ranks have none of their own", found.copies[-1].lost)))
        found.findings.append(Finding(damages.ONE_MODEL_FILE, there[0], detail=detail))
        return
    for rank in missing:
        array = zero_inventory.numbered(rank, rank, found.data_parallel or 1)
        found.findings.append(Finding(damages.MISSING_RANK, array, detail="the file of its model states"))


def _may_have_loaded_universal(info: Mapping[str, Any]) -> bool:
    """Whether the saved configuration has `load_universal`. True if only the name of its file is saved."""
    config = info.get("ds_config")
    if not isinstance(config, dict):
        return True
    own = config.get("checkpoint")
    return isinstance(own, dict) and bool(own.get("load_universal"))


def _frozen(info: Mapping[str, Any]) -> str:
    """Why one rank's model file cannot replace another's: its parts of frozen parameters. Empty if it can."""
    if "frozen_param_fragments" not in info:
        return "it is unknown whether parameters are frozen, of which each rank had a part"
    frozen = info["frozen_param_fragments"] or info.get("frozen_param_shapes") or ()
    return f"their parts of {len(frozen)} frozen parameters are lost" if frozen else ""


def _what_can_differ(info: Mapping[str, Any]) -> str:
    """The contents that DeepSpeed does not keep equal on all ranks, although they usually are."""
    module = info.get("module")
    weights = module.values() if isinstance(module, dict) else ()
    buffers = sum(isinstance(value, TensorHeader) and value.numel > 0 for value in weights)
    named = ", ".join(sorted(map(str, info.keys() - OF_THE_ENGINE.split())))
    own = [f"{buffers} buffers"] * (buffers > 0) + [f"the client's {named}"] * bool(named)
    return " and ".join(own)


def _check_paddings(found: Checkpoint, files: list[RankFile]) -> None:
    for file in files:
        for group, (padding, partition) in enumerate(zip(file.state.paddings, file.state.partitions, strict=False)):
            numel = numel_of(partition)
            if padding > numel:
                detail = f"group {group}: padding {padding}, partition {numel}"
                found.findings.append(Finding(damages.LARGE_PADDING, file.path.name, detail=detail))


def _stage12(
    found: Checkpoint, files: list[RankFile], shapes: list[dict[str, Shape]], neighbours: bool
) -> dict[Key, Parameter]:
    whole = {name: shape for group in shapes for name, shape in group.items()}
    parameters: dict[Key, Parameter] = {}
    for file in sorted(files, key=lambda file: file.rank):
        if file.rank >= (found.data_parallel or 0):
            continue
        for group, partition in enumerate(file.state.partitions):
            _check_fragments(found, file, partition)
            of_experts = _expert_parallel_rank(found, file, group, neighbours)
            for name, (start, numel) in partition.fragments.items():
                unread = Parameter(whole.get(name, (0,)), shape_is_known=name in whole)
                parameter = parameters.setdefault((name, of_experts), unread)
                parameter.ranks.append(OnRank(file, partition, start, numel))
    empty = {name for name, shape in whole.items() if not math.prod(shape)}  # as on a rank without a share of it
    for name in whole.keys() - {name for name, _ in parameters} - empty:
        if any(partition.fragments for file in files for partition in file.state.partitions):
            found.findings.append(Finding(damages.FRAGMENTS, name, detail="no rank has a fragment of it"))
    return parameters


def _expert_parallel_rank(found: Checkpoint, file: RankFile, group: int, neighbours: bool) -> str:
    """The label of a rank's expert-parallel rank, for a group that not all ranks share; empty for other groups.

    Neighboring ranks have different experts, unless `neighbours` is set: with 4 ranks, 2 of them per expert,
    ranks 0 and 2 share one.
    """
    ranks, counts = found.data_parallel or 1, file.state.data_parallel
    if group >= len(counts) or counts[group] == ranks or ranks % counts[group]:
        return ""
    sharing = zero_experts.ranks_of(ranks, ranks // counts[group], neighbours)
    return next((f"{EXPERT_RANK}{ep}" for ep, own in enumerate(sharing) if file.rank in own), "")


def _check_fragments(found: Checkpoint, file: RankFile, partition: Partition) -> None:
    """Check that fragments lie within the partition and do not overlap."""
    at, last = 0, ""
    for name, (start, numel) in sorted(partition.fragments.items(), key=lambda item: item[1]):
        if start < at:
            detail = f"{file.path.name}: begins at {start}, before the end of {last} at {at}"
            found.findings.append(Finding(damages.FRAGMENTS, name, detail=detail))
        at, last = max(at, start + numel), name
    if at > numel_of(partition):
        detail = f"{file.path.name}: ends at {at}, the partition at {numel_of(partition)}"
        found.findings.append(Finding(damages.FRAGMENTS, last, detail=detail))


def _stage3(found: Checkpoint, files: list[RankFile], shapes: list[dict[str, Shape]]) -> dict[Key, Parameter]:
    """The parameters of all groups and ranks; empty, with a finding, if a file contradicts the model's."""
    ranks = found.data_parallel or len(files)
    every = tuple(range(ranks))
    parameters: dict[Key, Parameter] = {}
    for file in sorted(files, key=lambda file: file.rank):
        partitions = file.state.partitions
        if len(partitions) != len(shapes):
            detail = f"{file.path.name}: {len(partitions)} groups, {len(shapes)} in the model's file"
            found.findings.append(Finding(damages.FRAGMENTS, "all parameters", detail=detail))
            return {}
        for number, (partition, group) in enumerate(zip(partitions, shapes, strict=True)):
            own = next(iter(file.state.sharing[number : number + 1]), ()) or every
            if file.rank not in own:
                detail = f"{file.path.name}: of group {number}, which ranks {', '.join(map(str, own))} share"
                found.findings.append(Finding(damages.MIXED_RANKS, file.path.name, detail=detail))
                return {}
            expected = sum(share.each for _, share in zero.shares(group, len(own)))
            if numel_of(partition) != expected:
                detail = f"{file.path.name}: {numel_of(partition)} elements, {expected} by the model's shapes"
                found.findings.append(Finding(damages.FRAGMENTS, f"all parameters of group {number}", detail=detail))
                return {}
            of_experts = "" if own == every else f"experts of ranks {', '.join(map(str, own))}"
            for name, share in zero.shares(group, len(own)):
                parameter = parameters.setdefault((name, of_experts), Parameter(group[name]))
                parameter.ranks.append(OnRank(file, partition, share.start, share.of(own.index(file.rank))))
    return parameters


def _streams(name: str, parameter: Parameter) -> dict[str, Stream]:
    """A parameter's optimizer state, by role."""
    parts = [part for part in parameter.ranks if part.numel]
    return {
        role: Stream(f"{name}.{key}", parts[0].partition.states[key].type.dtype, tuple(_extents(parts, key)))
        for role, key in STATES.items()
        if parts and all(_reaches(part, key) for part in parts)
    }


def _further(name: str, label: str, parameter: Parameter) -> Iterator[Shard]:
    """Shards for a parameter's states of optimizers other than Adam. They are only checked for NaN and infinity."""
    parts: dict[tuple[str, str], list[OnRank]] = {}
    for part in (part for part in parameter.ranks if part.numel):
        for key in part.partition.states.keys() - STATES.values():
            if _reaches(part, key):
                parts.setdefault((key, part.partition.states[key].type.dtype), []).append(part)
    for (key, dtype), own in sorted(parts.items(), key=lambda one: one[0]):
        stream = Stream(f"{name}.{key}", dtype, tuple(_extents(own, key)))
        yield Shard(name, label, (stream.numel,), {EXP_AVG: stream})


def _reaches(part: OnRank, key: str) -> bool:
    """Whether a tensor covers a rank's elements. A main parameter saved without padding may have a larger storage."""
    flat = part.partition.states.get(key)
    return flat is not None and part.start + part.numel <= max(flat.numel, flat.room)


def _extents(parts: list[OnRank], key: str) -> Iterator[Extent]:
    for part in parts:
        flat: Flat = part.partition.states[key]
        size = ITEM_SIZE[flat.type.dtype]
        yield Extent(str(part.file.path), flat.offset + part.start * size, part.numel * size)
