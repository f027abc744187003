"""The validated model of a ZeRO checkpoint, from the headers of all its files. Contradictions are errors.

The only tensor data that is read is `step`, four bytes per param group. Offsets in files are in bytes, other sizes in
elements.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ckpt_patches.errors import UserError
from ckpt_patches.formats import settings, torch_file, zero, zero_addresses, zero_facts, zero_inventory
from ckpt_patches.formats import zero_experts as experts
from ckpt_patches.formats.torch_file import TensorHeader, TorchFile
from ckpt_patches.formats.zero import OPTIMIZER_STATE, Folder, ModelFile, Partition, RankState, required, stage_of
from ckpt_patches.formats.zero_experts import INFO, Experts, LocalExpert
from ckpt_patches.formats.zero_facts import Unlike
from ckpt_patches.formats.zero_inventory import ModelFacts, RankFacts
from ckpt_patches.runtime.processes import mapped

UPSTREAM = "convert it with DeepSpeed's own converter: python -m deepspeed.checkpoint.ds_to_universal"
# Patterns for the parameters of experts, as upstream writes them.
PATTERN, PATTERN_3 = r"\.experts\.w[123]$", r".*\.experts\.w[123]$"
WORTH_A_PROCESS = 128  # files; starting a process and receiving its results takes as long as reading some of these
# Left out of the common state at stages 1 and 2.
SHARDED = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups")

Wanted = TypeVar("Wanted")


@dataclass(frozen=True)
class File:
    """A file of the checkpoint. If one changes, a plan becomes invalid."""

    path: Path
    size: int  # bytes
    mtime_ns: int


@dataclass(frozen=True)
class Rank:
    """The content of a rank's optimizer file."""

    file: int
    pp: int
    tp: int
    dp: int
    partitions: tuple[Partition, ...]  # by param group


@dataclass(frozen=True)
class Checkpoint:
    """All headers of a checkpoint."""

    folder: Path
    stage: int
    pp_degree: int
    tp_degree: int
    dp_degree: int
    files: tuple[File, ...]
    ranks: tuple[Rank, ...]  # in the order pp, tp, dp
    models: tuple[ModelFile, ...]  # stages 1 and 2: by pp, tp; stage 3: by tp, of data-parallel rank 0
    copied: tuple[int, ...]  # files that a universal checkpoint has unchanged
    info: dict[str, Any]  # `universal_checkpoint_info`
    optimizer_state: dict[str, Any] = field(default_factory=dict)  # of the first rank, without sharded values
    experts: dict[str, Experts] = field(default_factory=dict)  # of AutoEP, by parameter
    local_experts: dict[str, LocalExpert] = field(default_factory=dict)  # of `deepspeed.moe`, by parameter
    expert_models: tuple[ModelFile, ...] = ()  # stage 3: by expert-parallel rank, of its first data-parallel rank
    rewritten: tuple[tuple[int, dict[str, Any]], ...] = ()  # files changed in a universal checkpoint, new content


def check_folder(path: Path) -> Folder:
    """The names of the files in a checkpoint folder.

    Raises:
        UserError: the folder is not a ZeRO checkpoint, has files of two runs, or experts without a ZeRO optimizer.
    """
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; name the one with the files of the ranks, like OUT/global_step10")
    folder = zero.look(path)
    if not folder.optimizer and folder.experts:
        raise UserError(
            f"{path} has files of experts ({folder.experts[0]}) and none of a ZeRO optimizer, which a universal "
            "checkpoint is made of"
        )
    if not folder.optimizer:
        raise UserError(f"{path} has no file like bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt: no ZeRO checkpoint")
    if len(folder.prefixes) > 1:
        found = " and ".join(sorted(folder.prefixes))
        raise UserError(f"{path} has files of two trainings, {found}: keep those of one")
    return folder


def read(path: Path, *, trust: bool = False, inject_missing_state: bool = False) -> Checkpoint:
    """Read all headers of a checkpoint folder.

    Raises:
        UserError: a file is missing, damaged or from another checkpoint, or the kind of checkpoint is not supported.
    """
    reader = _Reader(check_folder(path), trust)
    try:
        first = reader.first_optimizer()
        stage = stage_of(first)
        found = (
            _stage_3(reader, stage, first) if stage > 2 else _stage_1_and_2(reader, stage, first, inject_missing_state)
        )
        _check_inventory(reader, stage)
        return found
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # such as a dict instead of a list
        raise UserError(f"{path} is not laid out as DeepSpeed does: {type(error).__name__}: {error}") from error


def _check_inventory(reader: "_Reader", stage: int) -> None:
    """Refuse what no run saves, judging by the files that have been read.

    Raises:
        UserError: something is absent, foreign or contradictory.
    """
    folder = reader.folder
    problems = zero_inventory.problems(reader.facts, reader.models, stage, folder.names, folder.optimizer)
    wrong = zero_inventory.blocking(problems)
    if wrong:
        kind, where, detail = wrong[0]
        more = f", and {len(wrong) - 1} more (ckpt-patches audit)" if len(wrong) > 1 else ""
        found = ": ".join(filter(None, (kind, where, detail)))
        raise UserError(f"{folder.path} is damaged or incomplete: {found}{more}")


class _Reader:
    """Reads files of a folder, and records each one."""

    def __init__(self, folder: Folder, trust: bool) -> None:
        self.folder, self.trust = folder, trust
        self.files: list[File] = []
        self.facts: dict[tuple[int, int], RankFacts] = {}
        self.models: dict[tuple[int | None, int], ModelFacts] = {}
        self._ranks_of_models = {name: rank for rank, name in folder.models.items()}

    def path(self, file: int) -> Path:
        return self.files[file].path

    def read(self, name: str) -> tuple[int, dict[str, Any]]:
        """A file's index and content."""
        file = self._read(name)
        self.files.append(_file(file))
        if name in self._ranks_of_models:
            self.models[self._ranks_of_models[name]] = zero_facts.of_model(file)
        return len(self.files) - 1, file.value

    def read_all(self, names: Sequence[str], wanted: Callable[[int, TorchFile], Wanted]) -> list[Wanted]:
        """The result of `wanted(index, file)` for each file, computed in several processes."""
        begin = len(self.files)

        def read(number: int) -> tuple[File, Wanted]:
            file = self._read(names[number])
            return _file(file), wanted(begin + number, file)

        found = mapped(read, range(len(names)), WORTH_A_PROCESS)
        self.files += [file for file, _ in found]
        return [wanted for _, wanted in found]

    def _read(self, name: str) -> TorchFile:
        found = torch_file.read(self.folder.path / name, trust=self.trust)
        if not isinstance(found.value, dict):
            raise UserError(f"{found.path}: expected a dict in it, found {type(found.value).__name__}")
        return found

    def first_optimizer(self) -> dict[str, Any]:
        """The state in the first rank's optimizer file, which is not recorded."""
        folder = self.folder
        rank = (0, min(mp for _, mp in folder.optimizer))
        if rank not in folder.optimizer:
            _check_complete(folder, folder.optimizer, folder.dp_degree, 1 + max(mp for _, mp in folder.optimizer))
        path = folder.path / folder.optimizer[rank]
        optimizer: dict[str, Any] = required(torch_file.read(path, trust=self.trust).value, OPTIMIZER_STATE, path)
        return optimizer

    def model(self, file: int, value: dict[str, Any]) -> ModelFile:
        return zero.read_model(self.path(file), file, value)

    def ranks(
        self,
        check: Callable[[Path, dict[str, Any], RankState, int], None],
        pp_degree: int,
        tp_degree: int,
    ) -> tuple[Rank, ...]:
        """The content of the ranks' optimizer files, in the order pp, tp, dp. `check` gets each with its rank dp."""
        dps = range(self.folder.dp_degree)
        places = [(pp, tp, dp) for pp in range(pp_degree) for tp in range(tp_degree) for dp in dps]
        begin = len(self.files)

        def rank(number: int, file: TorchFile) -> tuple[Rank, RankFacts]:
            pp, tp, dp = places[number - begin]
            optimizer = required(file.value, OPTIMIZER_STATE, file.path)
            state = zero.read_rank(file.path, number, optimizer)
            check(file.path, optimizer, state, dp)
            return Rank(number, pp, tp, dp, state.partitions), zero_facts.of_rank(file, optimizer, state)

        found = self.read_all([self.folder.optimizer[dp, pp * tp_degree + tp] for pp, tp, dp in places], rank)
        self.facts = {(dp, pp * tp_degree + tp): facts for (pp, tp, dp), (_, facts) in zip(places, found, strict=True)}
        return tuple(own for own, _ in found)


def _file(found: TorchFile) -> File:
    return File(found.path, found.size, found.mtime_ns)


def _check_complete(folder: Folder, files: Mapping[tuple[int, int], str], dp_degree: int, mp_degree: int) -> None:
    """Check that every rank has its file, and that there are no other files.

    Raises:
        UserError: a file is missing or unexpected. The error names the first one.
    """
    found = files.keys()
    expected = {(dp, mp) for dp in range(dp_degree) for mp in range(mp_degree)}
    for (dp, mp), what in (
        *((rank, "is missing") for rank in sorted(expected - found)),
        *((rank, "does not belong here") for rank in sorted(found - expected)),
    ):
        like = next(iter(files.values()))
        name = re.sub(r"pp_rank_\d+_mp_rank_\d+", f"pp_rank_{dp}_mp_rank_{mp:02d}", like)
        more = max(len(expected - found), len(found - expected)) - 1
        others = f", and {more} more" if more > 0 else ""
        raise UserError(
            f"{folder.path / name} {what}{others}: expected files of {dp_degree} data-parallel times {mp_degree} "
            "model-parallel ranks"
        )


def _check_no_tensor_parallel_experts(path: Path, tp_degree: int) -> None:
    if tp_degree > 1:
        raise UserError(f"{path} has AutoEP's experts on {tp_degree} tensor-parallel ranks, which no converter takes")


# Stages 1 and 2


def _stage_1_and_2(reader: _Reader, stage: int, first: Mapping[str, Any], inject_missing_state: bool) -> Checkpoint:
    folder = reader.folder
    names = folder.starting_with("mp_rank_")
    if not names:
        raise UserError(f"{folder.path} has no file like mp_rank_00_model_states.pt")
    read = [reader.read(name) for name in names]
    _check_inventory(reader, stage)
    pp_degree, tp_degree = _degrees(folder, [value for _, value in read])
    dp_degree = folder.dp_degree
    mp_degree = pp_degree * tp_degree
    if len(names) != mp_degree:
        raise UserError(f"{folder.path}: expected {mp_degree} files mp_rank_*, found {len(names)}")
    _check_complete(folder, folder.optimizer, dp_degree, mp_degree)
    models = [(reader.path(index), value) for index, value in read]
    layers = experts.joined_layers(models)
    known = _autoep(folder, models, layers, tp_degree) if layers else {}
    local = {} if layers else _local_experts(folder, first, models)
    of_experts = [] if layers else reader.read_all(folder.experts, _shapes_of)
    if of_experts:
        shapes = {name: tuple(shape) for group in read[0][1]["param_shapes"] for name, shape in group.items()}
        by_name = {name: shape for _, found in of_experts for name, shape in found.items()}
        experts.check_local(folder.path, local, shapes, by_name)

    ranks = reader.ranks(partial(_check_rank, {**known, **local}, dp_degree), pp_degree, tp_degree)
    _check_groups_of_stages(reader)
    parsed = tuple(reader.model(*one) for one in read)
    is_round_robin = zero_addresses.is_round_robin(read[0][1].get("ds_config"))
    ranks = _addressed(folder, ranks, parsed, is_round_robin=is_round_robin, all_share=not known and not local)
    others = [reader.read(name)[0] for name in folder.starting_with("mp") if name not in names]
    kept = experts.shortened(layers)
    return Checkpoint(
        folder=folder.path,
        stage=stage,
        pp_degree=pp_degree,
        tp_degree=tp_degree,
        dp_degree=dp_degree,
        files=tuple(reader.files),
        ranks=ranks,
        models=parsed,
        copied=(*(index for index, _ in read if not layers), *others, *(index for index, _ in of_experts)),
        info=_info(models[0][0], read[0][1], inject_missing_state or tp_degree == 1),
        optimizer_state=_common(first, dp_degree),
        experts=known,
        local_experts=local,
        rewritten=tuple((index, experts.with_layers(value, kept, PATTERN)) for index, value in read if layers),
    )


def _check_groups_of_stages(reader: _Reader) -> None:
    """A universal checkpoint has the settings of the first stage's param groups, which a load gives to all stages."""
    first, *others = [facts for (dp, _), facts in sorted(reader.facts.items()) if dp == 0]
    for facts in others:
        for number, pair in enumerate(zip(facts.settings, first.settings, strict=False)):
            for what in settings.differences(*pair):
                raise UserError(
                    f"{reader.folder.path}: param group {number} of {facts.name}: {what} in {first.name}; a universal "
                    "checkpoint has the param groups of the first pipeline stage alone, which a load would give to "
                    "all: resume on the same ranks"
                )


def _addressed(
    folder: Folder, ranks: Sequence[Rank], models: Sequence[ModelFile], *, is_round_robin: bool, all_share: bool
) -> tuple[Rank, ...]:
    """The ranks with correct addresses, also in Muon's momentum. Models and ranks are in the order pp, tp."""
    found: list[Rank] = []
    for number, model in enumerate(models):
        own = ranks[number * folder.dp_degree : (number + 1) * folder.dp_degree]
        partitions = [rank.partitions for rank in own]
        if is_round_robin:
            partitions = zero_addresses.in_written_order(partitions, model.shapes, str(folder.path))
        shapes = {name: shape for group in model.shapes for name, shape in group.items()}
        partitions = zero_addresses.with_momentum(partitions, shapes, all_share=all_share)
        found += [replace(rank, partitions=new) for rank, new in zip(own, partitions, strict=True)]
    return tuple(found)


def _degrees(folder: Folder, models: list[dict[str, Any]]) -> tuple[int, int]:
    """Pipeline- and tensor-parallel degree, as the checkpoint states or from the files of the first layer."""
    said = models[0].get("checkpoint_parallel_dimensions")
    if isinstance(said, dict):
        return int(said["pp_degree"]), int(said["tp_degree"])
    tp_degree = len(folder.starting_with("layer_01")) or len(models)
    return max(1, len(models) // tp_degree), tp_degree


def _autoep(
    folder: Folder, models: Sequence[tuple[Path, dict[str, Any]]], layers: list[dict[str, Any]], tp_degree: int
) -> dict[str, Experts]:
    """The parameters of AutoEP's layers, by name."""
    path = models[0][0]
    _check_no_tensor_parallel_experts(path, tp_degree)
    for model_path, model in models:
        _check_experts_shapes(model_path, model)
    experts.check_files(folder, layers)
    degree = required(layers[0], "ep_size", path)
    ranks = experts.ranks_of(folder.dp_degree, degree, experts.data_first(models))
    found = experts.parameters(path, layers, ranks)
    missing = found.keys() - {name for _, model in models for group in model["param_shapes"] for name in group}
    if missing:
        raise UserError(f"{path}: expected the shapes of the experts {', '.join(sorted(missing))}, found none")
    return found


def _check_experts_shapes(path: Path, model: Mapping[str, Any]) -> None:
    if "param_shapes" not in model:
        raise UserError(
            f"{path} does not record which shapes the parameters have (param_shapes): before 0.19.3 DeepSpeed saved no "
            "checkpoint of experts that can be converted; resume on the same ranks with a later one, and convert what "
            "it saves"
        )


def _local_experts(
    folder: Folder, first: Mapping[str, Any], models: Sequence[tuple[Path, dict[str, Any]]]
) -> dict[str, LocalExpert]:
    """The experts' parameters in layers of `deepspeed.moe`, by their names in the ranks' files."""
    path, model = models[0]
    if folder.experts:
        _check_experts_shapes(path, model)
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


def _shapes_of(number: int, file: TorchFile) -> tuple[int, dict[str, tuple[int, ...]]]:
    """An expert file's index, and the shapes in the file."""
    return number, {name: tensor.shape for name, tensor in file.value.items() if isinstance(tensor, TensorHeader)}


def _check_rank(
    known: Mapping[str, Experts | LocalExpert],
    dp_degree: int,
    path: Path,
    _optimizer: dict[str, Any],
    found: RankState,
    _dp: int,
) -> None:
    for count, partition in zip(found.data_parallel, found.partitions, strict=False):
        # Without a fragment of a group on this rank, it is unknown whether the group has experts.
        sharing = {known[name].sharing if name in known else dp_degree for name in partition.fragments}
        for expected in sharing or ({dp_degree} if not known else ()):
            if count != expected:
                raise UserError(f"{path} is of {count} data-parallel ranks, the folder has files of {expected}")


def _common(optimizer: Mapping[str, Any], dp_degree: int) -> dict[str, Any]:
    """The common state as upstream saves it: one rank's, without sharded values and paddings."""
    common = {key: value for key, value in optimizer.items() if key not in SHARDED}
    if common.get("partition_count"):
        common["partition_count"] = [dp_degree] * len(common["partition_count"])
    if common.get("group_paddings"):
        common["group_paddings"] = [0] * len(common["group_paddings"])
    common["param_groups"] = optimizer["base_optimizer_state"]["param_groups"]
    return common


def _info(path: Path, model: dict[str, Any], may_lack: bool) -> dict[str, Any]:
    """How parameters are split over tensor-parallel ranks. Can be absent with one tensor-parallel rank."""
    info = model.get(INFO)
    if info is None and may_lack:
        return {}
    if not isinstance(info, dict):
        raise UserError(
            f"{path} has no {INFO}, which the training program has to put there; use --inject-missing-state if no "
            "parameter is parallel in its tensors"
        )
    return info


# Stage 3, where the files of all ranks state which experts they have


def _stage_3(reader: _Reader, stage: int, optimizer: Mapping[str, Any]) -> Checkpoint:
    folder = reader.folder
    names = folder.zero3_models()
    if not names:
        raise UserError(f"{folder.path} has no file like zero_pp_rank_0_mp_rank_00_model_states.pt")
    dp_degree = folder.dp_degree
    tp_degree = 1 + max(mp for _, mp in folder.optimizer)
    _check_complete(folder, folder.optimizer, dp_degree, tp_degree)
    _check_complete(folder, names, dp_degree, tp_degree)

    # Only the first model of each tensor-parallel rank is parsed: the many others have the same shapes.
    read = [reader.read(names[0, tp]) for tp in range(tp_degree)]
    first_path, first = reader.path(read[0][0]), read[0][1]
    autoep = experts.layers_of(first_path, first) is not None

    def of_rank(number: int, file: TorchFile) -> tuple[int, dict[str, Any], Unlike]:
        if not autoep and experts.layers_of(file.path, file.value) is not None:
            raise UserError(f"{file.path} has layers of experts ({experts.KEY}), {first_path} has none")
        return number, file.value if autoep else {}, zero_facts.unlike(zero_facts.of_model(file), first)

    others = [(dp, tp) for tp in range(tp_degree) for dp in range(1, dp_degree)]
    of_others = reader.read_all([names[rank] for rank in others], of_rank)
    reader.models |= {rank: own.facts(first) for rank, (*_, own) in zip(others, of_others, strict=True)}
    found = [(file, value if autoep else {}) for file, value in read]
    found += [(file, value) for file, value, _ in of_others]
    _check_inventory(reader, stage)
    known, of_experts = _autoep_3(reader, found, tp_degree) if autoep else ({}, ())
    ranks = reader.ranks(partial(_check_rank_3, known, of_experts, dp_degree), 1, tp_degree)
    rest = [name for name in folder.names if name.endswith("model_states.pt") and name not in names.values()]
    found += [reader.read(name) for name in rest]
    return Checkpoint(
        folder=folder.path,
        stage=stage,
        pp_degree=1,
        tp_degree=tp_degree,
        dp_degree=dp_degree,
        files=tuple(reader.files),
        ranks=ranks,
        models=tuple(reader.model(*one) for one in read),
        copied=tuple(file for file, _ in found if not autoep),
        info=first.get(INFO) or {},
        # All of it, including tensors.
        optimizer_state={**optimizer, "param_groups": optimizer["optimizer_state_dict"]["param_groups"]},
        experts=known,
        expert_models=of_experts,
        rewritten=tuple(
            (file, experts.with_layers(value, experts.layers_of(reader.path(file), value), PATTERN_3))
            for file, value in found
            if autoep
        ),
    )


def _autoep_3(
    reader: _Reader, found: Sequence[tuple[int, dict[str, Any]]], tp_degree: int
) -> tuple[dict[str, Experts], tuple[ModelFile, ...]]:
    """The parameters of AutoEP's layers by name, and a model-states file of each expert-parallel rank."""
    models = [(reader.path(file), value) for file, value in found]
    path = models[0][0]
    _check_no_tensor_parallel_experts(path, tp_degree)
    layers = [experts.layers_of_stage_3(*model) for model in models]
    ranks = experts.ranks_by_layers(path, layers)
    known = experts.parameters(path, layers[0], ranks)
    for (other, value), of_rank in zip(models, layers, strict=True):
        if experts.parameters(other, of_rank, ranks) != known:
            raise UserError(f"{other} and {path} contradict each other about the experts")
        frozen = sorted(known.keys() & (value.get("frozen_param_shapes") or {}).keys())
        if frozen:
            raise UserError(f"{other}: the experts {', '.join(frozen)} are frozen, and in no file of ZeRO's")
    read = [reader.model(*one) for one in found]
    for of_one in ranks:
        for rank in of_one:
            _check_shapes(reader, known, read[rank], read[of_one[0]], read[0])
    return known, tuple(read[of_one[0]] for of_one in ranks)


def _check_shapes(
    reader: _Reader, known: Mapping[str, Experts], model: ModelFile, of_experts: ModelFile, of_all: ModelFile
) -> None:
    """Check that a rank has its expert-parallel rank's experts and all other parameters, in separate groups."""
    path = reader.path(model.file)
    if model.shapes != of_experts.shapes:
        raise UserError(f"{path} has other shapes than {reader.path(of_experts.file)}, of the same experts")
    for group, shapes in enumerate(model.shapes):
        held = shapes.keys() & known.keys()
        if held and held != shapes.keys():
            raise UserError(f"{path}: parameter group {group} has parameters of experts and others, {sorted(shapes)}")
        if not held and (group >= len(of_all.shapes) or shapes != of_all.shapes[group]):
            raise UserError(f"{path} has other shapes in group {group} than {reader.path(of_all.file)}")
    if _names(of_all) - _names(model) - known.keys():
        raise UserError(f"{path} has not all parameters of {reader.path(of_all.file)}")


def _names(model: ModelFile) -> set[str]:
    return {name for shapes in model.shapes for name in shapes}


def _check_rank_3(
    known: Mapping[str, Experts],
    of_experts: Sequence[ModelFile],
    dp_degree: int,
    path: Path,
    optimizer: dict[str, Any],
    _state: RankState,
    dp: int,
) -> None:
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


def _sharing(known: Mapping[str, Experts], of_experts: Sequence[ModelFile], dp: int) -> dict[int, tuple[int, int]]:
    """By group of experts: the number of ranks that share it, and this rank's number among them."""
    found = {}
    for ep, model in enumerate(of_experts):
        for group, shapes in enumerate(model.shapes):
            sharing = next((known[name].ranks[ep] for name in shapes if name in known), ())
            if dp in sharing:
                found[group] = (len(sharing), sharing.index(dp))
    return found
