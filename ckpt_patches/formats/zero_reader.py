"""Reader for DeepSpeed's ZeRO checkpoints: each parameter's elements on all ranks, and the problems of the files."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TypeVar

from ckpt_patches.errors import UserError
from ckpt_patches.formats import damages, tensor_streams, zero, zero_experts, zero_folder, zero_inventory, zero_pipeline
from ckpt_patches.formats.checkpoint import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    WEIGHT,
    Checkpoint,
    Extent,
    Shard,
    Stream,
    first_beta,
)
from ckpt_patches.formats.dtypes import ITEM_SIZE
from ckpt_patches.formats.torch_file import TensorHeader, TorchFile
from ckpt_patches.formats.zero import RankFile, Shape
from ckpt_patches.formats.zero_folder import Part, Slice, Zero
from ckpt_patches.formats.zero_inventory import ModelFacts

EXPERT_RANK = "expert-parallel rank "  # prefix of a label
Wanted = TypeVar("Wanted")
STATES = {MASTER: zero.MASTER, EXP_AVG: "exp_avg", EXP_AVG_SQ: "exp_avg_sq"}


def is_zero(path: Path) -> bool:
    return bool(zero.look(path).optimizer)


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint, with findings for the problems of its files."""
    found = Checkpoint(path, "deepspeed zero")
    reader = _Reader(found)
    folder = zero.look(path)
    model = zero_folder.read(folder, reader.read_all)
    weights = _Weights(found, model)
    for model_rank in sorted({mp for _, mp in folder.optimizer}):
        if own := model.of(model_rank):
            _read_model_rank(found, model, own, weights)
        for (dp, mp), facts in model.models.items():
            if mp == model_rank and dp is not None:
                zero_folder.add_frozen_parts(
                    found, ModelFacts(facts.name, reader.values[facts.name]), dp, found.data_parallel
                )
    other_steps = zero_inventory.other_step(path.name, model.models.values())
    found.findings += [*model.problems, *other_steps]
    for name in folder.names:  # experts, layers
        if name.endswith(".pt") and name not in found.read:
            tensor_streams.read(path / name, found)
    return found


class _Reader:
    """Reads the files one by one, and registers their tensors; a file that cannot be read is a finding."""

    def __init__(self, found: Checkpoint) -> None:
        self.found = found
        self.values: dict[str, Mapping[str, Any]] = {}  # what the model files hold, by their names

    def read_all(self, names: Sequence[str], wanted: Callable[[TorchFile], Wanted]) -> list[Wanted | None]:
        return [self._read(self.found.path / name, wanted) for name in names]

    def _read(self, path: Path, wanted: Callable[[TorchFile], Wanted]) -> Wanted | None:
        file = tensor_streams.read_file(path, self.found)
        if file is None:
            return None
        if zero.MODEL.fullmatch(path.name):
            self.values[path.name] = file.value
        try:
            return wanted(file)
        except UserError as error:
            self.found.findings.append(tensor_streams.refused(error, path.name))
            return None


def _read_model_rank(found: Checkpoint, model: Zero, files: list[RankFile], weights: "_Weights") -> None:
    """Add the shards of one model-parallel rank."""
    model_rank = files[0].model_rank
    info = model.model(model_rank)
    _set_run(found, model, files)
    _check_paddings(found, files)
    if model.stage > 2 and not model.folder.experts:  # with experts, only the first rank saves the rest of the model
        _check_model_files(found, model.folder, model_rank, info)
    label = f"mp_rank_{model_rank:02d}" if (zero_inventory.count_of(info.get("mp_world_size")) or 1) > 1 else ""
    stated = zero_folder.shapes_of(info)
    trained = {name for file in files for partition in file.partitions for name in partition.fragments}
    shapes = stated or _shapes_of_weights(info, trained) or weights.shapes_in_layers(trained, model_rank)
    slices, problems = zero_folder.slices(model, model_rank, shapes)
    found.findings += problems
    found.padded += _partitions(files, slices, all_groups=model.stage > 2)
    experts = {(match[1], match[2]) for own in slices if (match := zero_experts.LOCAL.fullmatch(own.name))}
    local = Counter(layer for layer, _ in experts)
    for own in slices:
        of_experts = _experts_of(own, found.data_parallel or 0)
        where = ", ".join(filter(None, (label, of_experts)))  # expert-parallel ranks use one name for different experts
        if own.shape is None and not of_experts and (zero_inventory.is_expert(own.name) or not stated):
            found.add(damages.NOT_JUDGED, own.name, "no file has its shape", shard=where)
        elif contradiction := own.contradiction:
            kind = damages.NOT_JUDGED if of_experts else damages.FRAGMENTS
            found.add(kind, own.name, contradiction, shard=where)
        else:
            found.shards.append(_shard(own, where, weights, local if of_experts else {}))
        found.shards += _further(label, own)


def _shard(own: Slice, where: str, weights: "_Weights", local: Mapping[str, int]) -> Shard:
    """A parameter's shard. `local` is each layer's number of experts per rank; empty for what all ranks share."""
    shape, streams = own.shape or (), _streams(own)
    match = zero_experts.LOCAL.fullmatch(own.name)
    if own.is_equal:  # at stage 3 a rank has only a part of the weight
        pass
    elif local:
        streams |= weights.of_expert(own, own.expert_rank * local[match[1]] if match else 0, shape)
    else:
        streams |= weights.of(own, shape)
    return Shard(own.name, where, shape, streams)


def _experts_of(own: Slice, ranks: int) -> str:
    """The label of the ranks that share an expert; empty for what all ranks share."""
    if len(own.sharing) == ranks:
        return ""
    return f"experts of ranks {', '.join(map(str, own.sharing))}" if own.is_equal else f"{EXPERT_RANK}{own.expert_rank}"


class _Weights:
    """The model's weights at stages 1 and 2, from the model's file, or from the layers' files of a pipeline."""

    def __init__(self, found: Checkpoint, model: Zero) -> None:
        self.found, self.models = found, model.models
        self.folder = folder = model.folder
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
                    self.found.add(damages.MISSING_WEIGHT, name, detail, shard=label)
                elif len(tied) == 1:  # several that look the same are ambiguous
                    self.places[name, mp] = tied[0]

    def of(self, own: Slice, shape: Shape) -> dict[str, Stream]:
        """A parameter's weight, by role; empty if it cannot be determined."""
        name, model_rank = own.name, own.model_rank
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
            return self.of_expert(own, 0, shape)
        found = tensor_streams.weight(self.found, path, name, value, shape)
        return {WEIGHT: found} if found else {}

    def shapes_in_layers(self, trained: Iterable[str], model_rank: int) -> list[dict[str, Shape]]:
        """Of the trained parameters of a pipeline: without ZeRO no file of its model states them."""
        places = zero_pipeline.places(dict.fromkeys(trained, ()), self.layers, model_rank)
        held = {name: (self.layers.get(place.file) or {}).get(place.key) for name, place in places.items()}
        return [{name: tuple(weight.shape) for name, weight in held.items() if isinstance(weight, TensorHeader)}]

    def of_expert(self, own: Slice, first: int, shape: Shape) -> dict[str, Stream]:
        """An expert's weight, by role. `first` is the number of the first of the rank's experts among all."""
        match = zero_experts.LOCAL.fullmatch(own.name)
        if not match:
            return {}
        name = f"{match[1]}{first + int(match[2])}{match[3]}"
        file, value = self.experts.get((name, f"_mp_rank_{own.model_rank:02d}_model_states.pt"), ("", None))
        found = tensor_streams.weight(self.found, self.folder.path / file, name, value, shape) if file else None
        return {WEIGHT: found} if found else {}

    def _in_layer(self, name: str, place: zero_pipeline.Place) -> Any:
        value = self.layers[place.file].get(place.key)
        if value is None and not zero_inventory.is_expert(name):
            self.found.add(damages.MISSING_WEIGHT, place.file, f"no weight of {name:.100}")
        return value


def _shapes_of_weights(info: Mapping[str, Any], trained: Set[str]) -> list[dict[str, Shape]]:
    """The shapes of trained parameters, from their weights. With experts, older releases save no `param_shapes`."""
    if not any(map(zero_inventory.is_expert, trained)):
        return []
    module = info.get("module")
    weights = module.items() if isinstance(module, Mapping) else ()
    return [{name: tuple(w.shape) for name, w in weights if name in trained and isinstance(w, TensorHeader)}]


def _partitions(files: list[RankFile], slices: list[Slice], *, all_groups: bool) -> Iterator[Extent]:
    """The byte ranges of groups that hold parameters. Bytes outside the parameters are padding with any value.

    `all_groups`, as at stage 3: a finding says why a group there has no slices, and no file where its padding is.
    """
    used = set() if all_groups else {id(part.partition) for own in slices for part in own.parts}
    numbered = ((n, partition) for file in files for n, partition in enumerate(file.partitions))
    groups = {n for n, partition in numbered if all_groups or id(partition) in used}
    for file in files:
        for number, partition in enumerate(file.partitions):
            for flat in partition.states.values() if number in groups else ():
                yield Extent(str(file.path), flat.offset, flat.numel * ITEM_SIZE[flat.type.dtype])


def _set_run(found: Checkpoint, model: Zero, files: list[RankFile]) -> None:
    """Set the facts about the run that the files of one model-parallel rank state."""
    found.data_parallel = model.data_parallel(files[0].model_rank)
    steps = {int(file.step) for file in files if file.step is not None}
    # SGD and Lion store no step; an optimizer that never stepped stores no state.
    found.step = max(steps, default=None if any(file.states for file in files) else 0)
    found.groups = [*files[0].settings]
    found.beta1 = first_beta(found.groups)


def _check_model_files(found: Checkpoint, folder: zero.Folder, model_rank: int, info: Mapping[str, Any]) -> None:
    """Check that each rank has a model file, since at stage 3 it loads its own."""
    there = {dp: name for (dp, mp), name in folder.zero3_models().items() if mp == model_rank}
    missing = sorted({dp for dp, mp in folder.optimizer if mp == model_rank} - there.keys())
    if not missing:
        return
    if there.keys() == {0} and info and _is_equal_on_all_ranks(info):
        found.add(damages.ONE_MODEL_FILE, there[0], f"{len(missing)} ranks have none of their own")
        return
    for rank in missing:
        array = zero_inventory.numbered(rank, rank, found.data_parallel or 1)
        found.add(damages.MISSING_RANK, array, "the file of its model states")


def _is_equal_on_all_ranks(info: Mapping[str, Any]) -> bool:
    """Whether all ranks may have saved into this file: with `load_universal`, and without parts of frozen parameters.

    If only the name of its file is saved, the configuration can have `load_universal`.
    """
    config = info.get("ds_config")
    own = config.get("checkpoint") if isinstance(config, dict) else {"load_universal": True}
    has_frozen = info.get("frozen_param_fragments", True) or info.get("frozen_param_shapes")
    return isinstance(own, dict) and bool(own.get("load_universal")) and not has_frozen


def _check_paddings(found: Checkpoint, files: list[RankFile]) -> None:
    for file in files:
        for group, (padding, partition) in enumerate(zip(file.paddings, file.partitions, strict=False)):
            numel = partition.numel
            if padding > numel:
                found.add(damages.LARGE_PADDING, file.path.name, f"group {group}: padding {padding}, partition {numel}")


def _streams(own: Slice) -> dict[str, Stream]:
    """A parameter's optimizer state, by role."""
    parts = [part for part in own.parts if part.numel]
    return {
        role: Stream(
            f"{own.name}.{key}", parts[0].partition.states[key].type.dtype, tuple(part.extent(key) for part in parts)
        )
        for role, key in STATES.items()
        if parts and all(_reaches(part, key) for part in parts)
    }


def _further(label: str, own: Slice) -> Iterator[Shard]:
    """Shards for a parameter's states of optimizers other than Adam. They are only checked for NaN and infinity."""
    parts: dict[tuple[str, str], list[Part]] = {}
    for part in (part for part in own.parts if part.numel):
        for key in part.partition.states.keys() - STATES.values():
            if _reaches(part, key):
                parts.setdefault((key, part.partition.states[key].type.dtype), []).append(part)
    for (key, dtype), held in sorted(parts.items(), key=lambda one: one[0]):
        stream = Stream(f"{own.name}.{key}", dtype, tuple(part.extent(key) for part in held))
        yield Shard(own.name, label, (stream.numel,), {EXP_AVG: stream})


def _reaches(part: Part, key: str) -> bool:
    """Whether a tensor covers a rank's elements. A main parameter saved without padding may have a larger storage."""
    flat = part.partition.states.get(key)
    return flat is not None and part.start + part.numel <= max(flat.numel, flat.room)
