"""Read the headers of a checkpoint into records. The only data that is read is `step`, four bytes a parameter group."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ckpt_patches.convert import experts
from ckpt_patches.convert.experts import INFO, Experts, LocalExpert
from ckpt_patches.convert.headers import Checkpoint, File, Rank
from ckpt_patches.convert.traits import Traits
from ckpt_patches.convert.zero_folder import UPSTREAM, check_complete, look
from ckpt_patches.errors import UserError
from ckpt_patches.formats import torch_file, zero
from ckpt_patches.formats.torch_file import TensorHeader
from ckpt_patches.formats.zero import STATES, Folder, ModelFile, Partition, optimizer_of, required, stage_of
from ckpt_patches.runtime.processes import mapped

# Of the parameters of experts; upstream writes another one at stage 3.
PATTERN, PATTERN_3 = r"\.experts\.w[123]$", r".*\.experts\.w[123]$"
WORTH_A_PROCESS = 128  # files; to start one and to take over what it found takes as long as to read some of these
# What the common state leaves out at stage 1 and 2.
SHARDED = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups")

Wanted = TypeVar("Wanted")


def read(path: Path, traits: Traits, *, trust: bool = False, inject_missing_state: bool = False) -> Checkpoint:
    """All headers of a checkpoint folder.

    Raises:
        UserError: a file is missing, damaged or of another checkpoint, or this is one that is not converted here.
    """
    reader = _Reader(look(path), traits, trust)
    first = reader.first_optimizer()
    stage = stage_of(first)
    if stage <= 2:
        return _stage_1_and_2(reader, stage, first, inject_missing_state)
    if not traits.zero3:
        raise UserError(f"{path} is of ZeRO stage 3, which the converter of the installed DeepSpeed does not know")
    return _stage_3(reader, stage, first)


class _Reader:
    """Reads files of a folder, and remembers each one."""

    def __init__(self, folder: Folder, traits: Traits, trust: bool) -> None:
        self.folder, self.traits, self.trust = folder, traits, trust
        self.files: list[File] = []

    def read(self, name: str) -> tuple[int, dict[str, Any]]:
        """A file's index, and what is in it."""
        file, value = self._read(name)
        self.files.append(file)
        return len(self.files) - 1, value

    def read_all(self, names: Sequence[str], wanted: Callable[[int, Path, dict[str, Any]], Wanted]) -> list[Wanted]:
        """Of each file what is wanted of its index, its path and what is in it; several processes read them."""
        begin = len(self.files)

        def read(number: int) -> tuple[File, Wanted]:
            file, value = self._read(names[number])
            return file, wanted(begin + number, file.path, value)

        found = mapped(read, range(len(names)), WORTH_A_PROCESS)
        self.files += [file for file, _ in found]
        return [wanted for _, wanted in found]

    def _read(self, name: str) -> tuple[File, dict[str, Any]]:
        found = torch_file.read(self.folder.path / name, trust=self.trust)
        if not isinstance(found.value, dict):
            raise UserError(f"{found.path}: expected a dict in it, found {type(found.value).__name__}")
        return File(found.path, found.size, found.mtime_ns), found.value

    def first_optimizer(self) -> dict[str, Any]:
        """The state in the first rank's optimizer file, which is not remembered."""
        rank = (0, min(mp for _, mp in self.folder.optimizer))
        _check_there(self.folder, rank)
        path = self.folder.path / self.folder.optimizer[rank]
        return optimizer_of(path, torch_file.read(path, trust=self.trust).value)


def _check_there(folder: Folder, rank: tuple[int, int]) -> None:
    if rank not in folder.optimizer:
        like = next(iter(folder.optimizer.values()))
        check_complete(folder, folder.optimizer, folder.dp_degree, 1 + max(mp for _, mp in folder.optimizer), like)


# Stage 1 and 2


def _stage_1_and_2(reader: _Reader, stage: int, first: Mapping[str, Any], inject_missing_state: bool) -> Checkpoint:
    folder = reader.folder
    names = folder.starting_with("mp_rank_")
    if not names:
        raise UserError(f"{folder.path} has no file like mp_rank_00_model_states.pt")
    read = [reader.read(name) for name in names]
    pp_degree, tp_degree = _degrees(reader, [value for _, value in read])
    dp_degree = folder.dp_degree
    mp_degree = pp_degree * tp_degree
    if len(names) != mp_degree:
        raise UserError(f"{folder.path}: expected {mp_degree} files mp_rank_*, found {len(names)}")
    check_complete(folder, folder.optimizer, dp_degree, mp_degree, next(iter(folder.optimizer.values())))
    for index, value in read:
        _check_model(reader.files[index].path, value, dp_degree, reader.files[0].path, read[0][1])
    models = [(reader.files[index].path, value) for index, value in read]
    layers = experts.joined_layers(models)
    known = _autoep(reader, models, layers, tp_degree) if layers else {}
    local = {} if layers else _local_experts(reader, first, models)
    of_experts = [] if layers else reader.read_all(folder.experts, _shapes_of)
    if of_experts:
        shapes = {name: tuple(shape) for group in read[0][1]["param_shapes"] for name, shape in group.items()}
        by_name = {name: shape for _, found in of_experts for name, shape in found.items()}
        experts.check_local(folder.path, local, shapes, by_name)

    ranks = _ranks(reader, partial(_partitions, {**known, **local}), pp_degree, tp_degree, dp_degree)
    copied = tuple(index for index, _ in read if not layers) + tuple(
        reader.read(name)[0] for name in folder.starting_with("mp") if name not in names
    )
    copied += tuple(index for index, _ in of_experts)
    return Checkpoint(
        folder.path,
        stage,
        pp_degree,
        tp_degree,
        dp_degree,
        tuple(reader.files),
        ranks,
        tuple(_model(index, value, reader) for index, value in read),
        copied,
        _info(reader, read[0][1], inject_missing_state),
        _common(first, dp_degree),
        known,
        local,
        rewritten=tuple(
            (index, experts.with_layers(value, experts.shortened(layers), PATTERN)) for index, value in read if layers
        ),
    )


def _autoep(
    reader: _Reader, models: Sequence[tuple[Path, dict[str, Any]]], layers: list[dict[str, Any]], tp_degree: int
) -> dict[str, Experts]:
    """The parameters of AutoEP's layers, by name."""
    path = models[0][0]
    _check_known(path, reader.traits)
    if tp_degree > 1:
        raise UserError(f"{path} has AutoEP's experts on {tp_degree} tensor-parallel ranks, which no converter takes")
    experts.check_files(reader.folder, layers)
    degree = required(layers[0], "ep_size", path)
    ranks = experts.ranks_of(reader.folder.dp_degree, degree, experts.data_first(models))
    found = experts.parameters(path, layers, ranks)
    missing = found.keys() - {name for _, model in models for group in model["param_shapes"] for name in group}
    if missing:
        raise UserError(f"{path}: expected the shapes of the experts {', '.join(sorted(missing))}, found none")
    return found


def _local_experts(
    reader: _Reader, first: Mapping[str, Any], models: Sequence[tuple[Path, dict[str, Any]]]
) -> dict[str, LocalExpert]:
    """The parameters of the experts of `deepspeed.moe`'s layers, by their names in the ranks' files."""
    folder = reader.folder
    path, model = models[0]
    if folder.experts and "param_shapes" not in model:
        raise UserError(
            f"{path} does not say which shapes the parameters have (param_shapes): before 0.19.3 DeepSpeed saved no "
            "checkpoint of experts that can be converted; resume on the same ranks with a later one, and convert what "
            "it saves"
        )
    found = experts.local_experts(
        path, model["param_shapes"], first.get("partition_count") or (), folder.dp_degree, experts.data_first(models)
    )
    if len(models) > 1 and (found or folder.experts):
        raise UserError(
            f"{folder.path} has experts on {len(models)} tensor- or pipeline-parallel ranks, which no converter takes: "
            "resume on the same ranks"
        )
    if bool(found) != bool(folder.experts):
        raise UserError(
            f"{folder.path} has {len(folder.experts)} files layer_*_expert_* and {len(found)} parameters of experts in "
            f"{path.name}: expected both, or none"
        )
    return found


def _shapes_of(file: int, path: Path, value: dict[str, Any]) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Of what a file of an expert holds."""
    return file, {name: tensor.shape for name, tensor in value.items() if isinstance(tensor, TensorHeader)}


def _check_known(path: Path, traits: Traits) -> None:
    if not traits.autoep:
        raise UserError(
            f"{path} has layers of experts ({experts.KEY}), which are converted as DeepSpeed 0.19.8 does it alone, and "
            f"another one is installed; {UPSTREAM}"
        )


def _degrees(reader: _Reader, models: list[dict[str, Any]]) -> tuple[int, int]:
    """Pipeline and tensor-parallel degree: what the checkpoint says, or by the files of the first layer."""
    said = models[0].get("checkpoint_parallel_dimensions")
    if reader.traits.parallel_dimensions and isinstance(said, dict):
        return int(said["pp_degree"]), int(said["tp_degree"])
    tp_degree = len(reader.folder.starting_with("layer_01")) or len(models)
    return max(1, len(models) // tp_degree), tp_degree


def _partitions(
    known: Mapping[str, Experts | LocalExpert],
    path: Path,
    file: int,
    optimizer: dict[str, Any],
    _dp: int,
    dp_degree: int,
) -> tuple[Partition, ...]:
    found = zero.read_rank(path, file, optimizer)
    for count, partition in zip(found.data_parallel, found.partitions, strict=False):
        # A rank that has nothing of a group does not tell whether it is of experts.
        sharing = {known[name].sharing if name in known else dp_degree for name in partition.fragments}
        for expected in sharing or ({dp_degree} if not known else ()):
            if count != expected:
                raise UserError(f"{path} is of {count} data-parallel ranks, the folder has files of {expected}")
    return _with_moments(path, found.partitions[: found.states])


def _with_moments(path: Path, partitions: tuple[Partition, ...]) -> tuple[Partition, ...]:
    """The partitions, if all that is converted is there."""
    for partition in partitions:
        for key in STATES:
            required(partition.states, key, path)
    return partitions


def _common(optimizer: Mapping[str, Any], dp_degree: int) -> dict[str, Any]:
    """The common state as upstream saves it: a rank's, less what is sharded, with no paddings any more."""
    common = {key: value for key, value in optimizer.items() if key not in SHARDED}
    if common.get("partition_count"):
        common["partition_count"] = [dp_degree] * len(common["partition_count"])
    if common.get("group_paddings"):
        common["group_paddings"] = [0] * len(common["group_paddings"])
    # Up to 0.14.0 upstream leaves them out; see universal_group_settings.
    common["param_groups"] = optimizer["base_optimizer_state"]["param_groups"]
    return common


def _info(reader: _Reader, model: dict[str, Any], inject_missing_state: bool) -> dict[str, Any]:
    info = model.get(INFO)
    if info is None and inject_missing_state:
        return {}
    if not isinstance(info, dict):
        raise UserError(
            f"{reader.files[0].path} has no {INFO}, which the training program has to put there; "
            "say --inject-missing-state if no parameter is parallel in its tensors"
        )
    return info


# Stage 3, where files of all ranks say which experts they have


def _stage_3(reader: _Reader, stage: int, optimizer: Mapping[str, Any]) -> Checkpoint:
    folder = reader.folder
    models = folder.zero3_models()
    if not models:
        raise UserError(f"{folder.path} has no file like zero_pp_rank_0_mp_rank_00_model_states.pt")
    dp_degree = folder.dp_degree
    tp_degree = 1 + max(mp for _, mp in folder.optimizer)
    if tp_degree > 1 and not reader.traits.zero3_tensor_parallel:
        raise UserError(
            f"{folder.path} is of {tp_degree} tensor-parallel ranks at ZeRO stage 3, which the converter of the "
            "installed DeepSpeed does not know"
        )
    check_complete(folder, folder.optimizer, dp_degree, tp_degree, next(iter(folder.optimizer.values())))
    check_complete(folder, models, dp_degree, tp_degree, next(iter(models.values())))

    # Of each tensor-parallel rank the first model is looked at closely; the others have the same shapes, and are many.
    read = [reader.read(models[0, tp]) for tp in range(tp_degree)]
    first_path, first = reader.files[read[0][0]].path, read[0][1]

    autoep = experts.layers_of(first_path, first) is not None

    def checked(file: int, path: Path, value: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        _check_model(path, value, dp_degree, first_path, first)
        if not autoep and experts.layers_of(path, value) is not None:
            raise UserError(f"{path} has layers of experts ({experts.KEY}), {first_path} has none")
        return file, value if autoep else {}

    found = [checked(file, reader.files[file].path, value) for file, value in read]
    found += reader.read_all([models[dp, tp] for tp in range(tp_degree) for dp in range(1, dp_degree)], checked)
    known, of_experts = _autoep_3(reader, found, tp_degree) if autoep else ({}, ())
    ranks = _ranks(reader, partial(_partitions_3, known, of_experts), 1, tp_degree, dp_degree)
    others = [name for name in folder.names if name.endswith("model_states.pt") and name not in models.values()]
    found += [reader.read(name) for name in others]
    return Checkpoint(
        folder.path,
        stage,
        1,
        tp_degree,
        dp_degree,
        tuple(reader.files),
        ranks,
        tuple(_model(file, value, reader) for file, value in read),
        tuple(file for file, _ in found if not autoep),
        first.get(INFO) or {},
        {**optimizer, "param_groups": optimizer["optimizer_state_dict"]["param_groups"]},  # all of it, tensors too
        known,
        expert_models=of_experts,
        rewritten=tuple(
            (file, experts.with_layers(value, experts.layers_of(reader.files[file].path, value), PATTERN_3))
            for file, value in found
            if autoep
        ),
    )


def _autoep_3(
    reader: _Reader, found: Sequence[tuple[int, dict[str, Any]]], tp_degree: int
) -> tuple[dict[str, Experts], tuple[ModelFile, ...]]:
    """The parameters of AutoEP's layers by name, and of each expert-parallel rank a model-states file."""
    models = [(reader.files[file].path, value) for file, value in found]
    path = models[0][0]
    _check_known(path, reader.traits)
    if tp_degree > 1:
        raise UserError(f"{path} has AutoEP's experts on {tp_degree} tensor-parallel ranks, which no converter takes")
    layers = [experts.layers_of_stage_3(*model) for model in models]
    ranks = experts.ranks_by_layers(path, layers)
    known = experts.parameters(path, layers[0], ranks)
    for (other, value), of_rank in zip(models, layers, strict=True):
        if experts.parameters(other, of_rank, ranks) != known:
            raise UserError(f"{other} says something else of the experts than {path}")
        frozen = sorted(known.keys() & (value.get("frozen_param_shapes") or {}).keys())
        if frozen:
            raise UserError(f"{other}: the experts {', '.join(frozen)} are frozen, and in no file of ZeRO's")
    read = [zero.read_model(reader.files[file].path, file, value) for file, value in found]
    for of_one in ranks:
        for rank in of_one:
            _check_shapes(reader, known, read[rank], read[of_one[0]], read[0])
    return known, tuple(read[of_one[0]] for of_one in ranks)


def _check_shapes(
    reader: _Reader, known: Mapping[str, Experts], model: ModelFile, of_experts: ModelFile, of_all: ModelFile
) -> None:
    """A rank has the experts of its expert-parallel rank, and the rest of all; no group has both."""
    path = reader.files[model.file].path
    if model.shapes != of_experts.shapes:
        raise UserError(f"{path} has other shapes than {reader.files[of_experts.file].path}, of the same experts")
    for group, shapes in enumerate(model.shapes):
        held = shapes.keys() & known.keys()
        if held and held != shapes.keys():
            raise UserError(f"{path}: parameter group {group} has parameters of experts and others, {sorted(shapes)}")
        if not held and (group >= len(of_all.shapes) or shapes != of_all.shapes[group]):
            raise UserError(f"{path} has other shapes in group {group} than {reader.files[of_all.file].path}")
    if (
        {name for shapes in of_all.shapes for name in shapes}
        - {name for shapes in model.shapes for name in shapes}
        - known.keys()
    ):
        raise UserError(f"{path} has not all parameters of {reader.files[of_all.file].path}")


def _partitions_3(
    known: Mapping[str, Experts],
    of_experts: Sequence[ModelFile],
    path: Path,
    file: int,
    optimizer: dict[str, Any],
    dp: int,
    dp_degree: int,
) -> tuple[Partition, ...]:
    count = optimizer.get("partition_count", dp_degree)
    if count != dp_degree:
        raise UserError(f"{path} is of {count} data-parallel ranks, the folder has files of {dp_degree}")
    groups = optimizer.get("ds_zero_partition_groups") or []
    expected = _sharing(known, of_experts, dp)
    if len(groups) < len(expected):
        raise UserError(f"{path}: expected which ranks share each of {len(expected)} groups, found {len(groups)}")
    for index, group in enumerate(groups):
        said = (group.get("partition_count", dp_degree), group.get("partition_rank", dp))
        if said != expected.get(index, (dp_degree, dp)):
            raise UserError(f"{path} has groups that are partitioned over a part of the ranks only; {UPSTREAM}")
    return _with_moments(path, zero.read_rank(path, file, optimizer).partitions)


def _sharing(known: Mapping[str, Experts], of_experts: Sequence[ModelFile], dp: int) -> dict[int, tuple[int, int]]:
    """By group of experts: how many ranks share it, and which of them this one is."""
    found = {}
    for ep, model in enumerate(of_experts):
        for group, shapes in enumerate(model.shapes):
            sharing = next((known[name].ranks[ep] for name in shapes if name in known), ())
            if dp in sharing:
                found[group] = (len(sharing), sharing.index(dp))
    return found


# Both


def _ranks(
    reader: _Reader,
    partitions: Callable[[Path, int, dict[str, Any], int, int], tuple[Partition, ...]],
    pp_degree: int,
    tp_degree: int,
    dp_degree: int,
) -> tuple[Rank, ...]:
    """What the ranks' optimizer files hold, in the order pp, tp, dp."""
    places = [(pp, tp, dp) for pp in range(pp_degree) for tp in range(tp_degree) for dp in range(dp_degree)]
    begin = len(reader.files)

    def rank(file: int, path: Path, value: dict[str, Any]) -> Rank:
        pp, tp, dp = places[file - begin]
        return Rank(file, pp, tp, dp, partitions(path, file, optimizer_of(path, value), dp, dp_degree))

    return tuple(reader.read_all([reader.folder.optimizer[dp, pp * tp_degree + tp] for pp, tp, dp in places], rank))


def _model(file: int, value: dict[str, Any], reader: _Reader) -> ModelFile:
    return zero.read_model(reader.files[file].path, file, value)


def _check_model(path: Path, value: dict[str, Any], dp_degree: int, first_path: Path, first: dict[str, Any]) -> None:
    """A file of another training, or of another step of this one."""
    said = value.get("dp_world_size", dp_degree)
    if said != dp_degree:
        raise UserError(f"{path} is of {said} data-parallel ranks, the folder has files of {dp_degree}")
    for key in ("iteration", "global_steps"):
        if value.get(key) != first.get(key):
            raise UserError(f"{path} is of {key} {value.get(key)}, {first_path} of {first.get(key)}")
