"""What a conversion takes from a ZeRO folder: the slices of each parameter, and what is saved beside them.

The first problem of the folder's model is an error here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ckpt_patches.convert.output_files import Records
from ckpt_patches.errors import NothingToDo, UserError
from ckpt_patches.formats import settings, torch_file, zero, zero_folder, zero_inventory
from ckpt_patches.formats import zero_experts as experts
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.torch_file import TensorHeader, TorchFile
from ckpt_patches.formats.zero import OPTIMIZER_STATE, Folder, Shape, required
from ckpt_patches.formats.zero_experts import INFO, Experts, LocalExpert
from ckpt_patches.formats.zero_folder import Slice, Zero
from ckpt_patches.runtime.processes import mapped

UPSTREAM = (
    "convert it with DeepSpeed's own converter: CKPT_PATCHES_SKIP=universal_converter python -m "
    "deepspeed.checkpoint.ds_to_universal"
)
HAND_OVER = "python -m deepspeed_patches.ds_to_universal --inject_missing_state"
# Patterns for the parameters of experts, as upstream writes them.
PATTERN, PATTERN_3 = r"\.experts\.w[123]$", r".*\.experts\.w[123]$"
WORTH_A_PROCESS = 128  # files; starting a process and receiving its results takes as long as reading some of these
# Left out of the common state at stages 1 and 2.
SHARDED = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups")

Wanted = TypeVar("Wanted")
Model = tuple[Path, dict[str, Any]]


@dataclass(frozen=True)
class Source:
    """A checkpoint to convert."""

    zero: Zero
    tp_degree: int
    slices: dict[str, dict[int, list[Slice]]]  # by parameter and model-parallel rank; several: of experts
    info: dict[str, Any]  # `universal_checkpoint_info`
    optimizer_state: dict[str, Any] = field(default_factory=dict)  # of the first rank, without sharded values
    records: dict[str, Records] = field(default_factory=dict)  # by file
    copied: tuple[str, ...] = ()  # names of files that a universal checkpoint has unchanged
    rewritten: tuple[tuple[str, Any], ...] = ()  # names of files that are changed in it, with their new content
    experts: Mapping[str, Experts] = field(default_factory=dict)  # of AutoEP, by parameter
    local_experts: Mapping[str, LocalExpert] = field(default_factory=dict)  # of `deepspeed.moe`, by parameter


def check_folder(path: Path) -> Folder:
    """The names of the files in a checkpoint folder.

    Raises:
        UserError: the folder is not a ZeRO checkpoint, has files of two runs, or experts without a ZeRO optimizer.
    """
    if not path.is_dir():
        raise _wrong_path(path)
    folder = zero.look(path)
    if not folder.optimizer and folder.experts:
        raise UserError(
            f"{path} has files of experts ({folder.experts[0]}) and none of a ZeRO optimizer, which a universal "
            "checkpoint is made of"
        )
    if not folder.optimizer:
        raise _wrong_path(path)
    if len(folder.prefixes) > 1:
        found = " and ".join(sorted(folder.prefixes))
        raise UserError(f"{path} has files of two trainings, {found}: keep those of one")
    return folder


def _wrong_path(path: Path) -> UserError:
    from ckpt_patches.formats.reading import wrong_path  # imports all readers
    from ckpt_patches.formats.universal import is_universal

    if path.is_dir() and is_universal(path):
        return NothingToDo(f"{path} is a universal checkpoint already")
    return wrong_path(path, "a ZeRO checkpoint, with files like bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")


def read(path: Path, *, trust: bool = False, inject_missing_state: bool = False) -> Source:
    """Read all headers of a checkpoint folder.

    Raises:
        UserError: a file is missing, damaged or from another checkpoint, or the kind of checkpoint is not supported.
    """
    folder = check_folder(path)

    records: dict[str, Records] = {}

    def read_one(name: str, wanted: Callable[[TorchFile], Wanted]) -> tuple[Records, Wanted]:
        file = torch_file.read(path / name, trust=trust)
        return Records.of(file.storages), wanted(file)

    def read_all(names: Sequence[str], wanted: Callable[[TorchFile], Wanted]) -> list[Wanted]:
        read = mapped(partial(read_one, wanted=wanted), names, WORTH_A_PROCESS)
        records.update({str(path / name): own for name, (own, _) in zip(names, read, strict=True)})
        return [found for _, found in read]

    found = zero_folder.read(folder, read_all)
    _refuse(path, zero_inventory.blocking(found.problems))
    if not found.models:
        raise UserError(f"{path} has no file like mp_rank_00_model_states.pt")
    source = (_stage_3 if found.stage > 2 else _stages_1_and_2)(found, trust, inject_missing_state)
    read_all([name for name in source.copied if str(path / name) not in records], lambda _: None)
    return replace(source, records=records)


def _refuse(path: Path, problems: Sequence[Finding]) -> None:
    if problems:
        more = f", and {len(problems) - 1} more (ckpt-patches audit)" if len(problems) > 1 else ""
        first = problems[0]
        found = ": ".join(filter(None, (first.kind.name, first.array, first.detail)))
        raise UserError(f"{path} is damaged or incomplete: {found}{more}")


def _slices(found: Zero, model_ranks: int) -> dict[str, dict[int, list[Slice]]]:
    """The slices by parameter and model-parallel rank, in the order of the models."""
    by_name: dict[str, dict[int, list[Slice]]] = {}
    for model_rank in range(model_ranks):
        shapes = zero_folder.shapes_of(found.model(model_rank))
        slices, problems = zero_folder.slices(found, model_rank, shapes)
        _refuse(found.folder.path, problems)
        for name in (name for group in shapes for name in group):
            by_name.setdefault(name, {})
        for own in slices:
            if contradiction := own.contradiction:
                where = f" of model-parallel rank {model_rank}" if model_ranks > 1 else ""
                raise UserError(f"{found.folder.path} is damaged or incomplete: {own.name}{where}: {contradiction}")
            by_name.setdefault(own.name, {}).setdefault(model_rank, []).append(own)
        every = tuple(range(found.data_parallel(model_rank)))
        for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
            by_name[name].setdefault(model_rank, [Slice(name, model_rank, every, shape)])  # without elements
    return by_name


def _read_models(found: Zero, names: Sequence[str], trust: bool) -> list[Model]:
    folder = found.folder.path
    return [(folder / name, torch_file.read(folder / name, trust=trust).value) for name in names]


def _common(found: Zero, trust: bool) -> dict[str, Any]:
    """The common state as upstream saves it: one rank's, at stages 1 and 2 without sharded values and paddings."""
    path = next(iter(found.ranks.values())).path
    optimizer: dict[str, Any] = torch_file.read(path, trust=trust).value[OPTIMIZER_STATE]
    if found.stage > 2:
        return {**optimizer, "param_groups": optimizer["optimizer_state_dict"]["param_groups"]}
    common = {key: value for key, value in optimizer.items() if key not in SHARDED}
    if common.get("partition_count"):
        common["partition_count"] = [found.data_parallel(0)] * len(common["partition_count"])
    if common.get("group_paddings"):
        common["group_paddings"] = [0] * len(common["group_paddings"])
    common["param_groups"] = optimizer["base_optimizer_state"]["param_groups"]
    return common


def _check_experts(models: Sequence[Model], tp_degree: int) -> None:
    for path, model in models:
        if tp_degree > 1:
            raise UserError(
                f"{path} has AutoEP's experts on {tp_degree} tensor-parallel ranks, which no converter takes"
            )
        _check_shapes(path, model)


def _check_shapes(path: Path, model: Mapping[str, Any]) -> None:
    if "param_shapes" not in model:
        raise UserError(
            f"{path} does not record which shapes the parameters have (param_shapes): before 0.19.3 DeepSpeed saved no "
            "checkpoint of experts that can be converted; resume on the same ranks with a later one, and convert what "
            "it saves"
        )


# Stages 1 and 2


def _stages_1_and_2(found: Zero, trust: bool, inject_missing_state: bool) -> Source:
    folder = found.folder
    models = [(folder.path / own.name, dict(own.value)) for own in found.models.values()]
    tp_degree = _tp_degree(found)
    layers = experts.joined_layers(models)
    known = _autoep(found, models, layers, tp_degree) if layers else {}
    local = {} if layers else _local_experts(found, models, trust)
    _check_groups_of_stages(found)
    names = [path.name for path, _ in models]
    copied = [*(names if not layers else ()), *(n for n in folder.starting_with("mp") if n not in names)]
    kept = experts.shortened(layers)
    return Source(
        zero=found,
        tp_degree=tp_degree,
        slices=_slices(found, len(models)),
        info=_info(*models[0], inject_missing_state or tp_degree == 1),
        optimizer_state=_common(found, trust),
        copied=(*copied, *(folder.experts if local else ())),
        rewritten=tuple((path.name, experts.with_layers(model, kept, PATTERN)) for path, model in models if layers),
        experts=known,
        local_experts=local,
    )


def _tp_degree(found: Zero) -> int:
    """The tensor-parallel degree, as the checkpoint states or from the files of the first layer."""
    said = found.model(0).get("checkpoint_parallel_dimensions")
    if isinstance(said, dict):
        return int(said["tp_degree"])
    return len(found.folder.starting_with("layer_01")) or len(found.models)


def _info(path: Path, model: dict[str, Any], may_lack: bool) -> dict[str, Any]:
    """How parameters are split over tensor-parallel ranks. Can be absent with one tensor-parallel rank."""
    info = model.get(INFO)
    if info is None and may_lack:
        return {}
    if not isinstance(info, dict):
        raise UserError(
            f"{path} has no {INFO}, which the training program has to put there; if no parameter is parallel in its "
            f"tensors: {HAND_OVER}"
        )
    return info


def _check_groups_of_stages(found: Zero) -> None:
    """A universal checkpoint has the settings of the first stage's param groups, which a load gives to all stages."""
    first, *others = [facts for (dp, _), facts in found.ranks.items() if dp == 0]
    for facts in others:
        for number, pair in enumerate(zip(facts.settings, first.settings, strict=False)):
            for what in settings.differences(*pair):
                raise UserError(
                    f"{found.folder.path}: param group {number} of {facts.name}: {what} in {first.name}; a universal "
                    "checkpoint has the param groups of the first pipeline stage alone, which a load would give to "
                    "all: resume on the same ranks"
                )


def _autoep(found: Zero, models: Sequence[Model], layers: list[dict[str, Any]], tp_degree: int) -> dict[str, Experts]:
    """The parameters of AutoEP's layers, by name."""
    path = models[0][0]
    _check_experts(models, tp_degree)
    experts.check_files(found.folder, layers)
    degree = required(layers[0], "ep_size", path)
    ranks = experts.ranks_of(found.data_parallel(0), degree, experts.data_first(models))
    known = experts.parameters(path, layers, ranks)
    missing = known.keys() - {name for _, model in models for group in model["param_shapes"] for name in group}
    if missing:
        raise UserError(f"{path}: expected the shapes of the experts {', '.join(sorted(missing))}, found none")
    return known


def _local_experts(found: Zero, models: Sequence[Model], trust: bool) -> dict[str, LocalExpert]:
    """The experts' parameters in layers of `deepspeed.moe`, by their names in the ranks' files."""
    folder, (path, model) = found.folder, models[0]
    if folder.experts:
        _check_shapes(path, model)
    shapes = zero_folder.shapes_of(model)
    counts = found.of(0)[0].data_parallel
    known = experts.local_experts(path, shapes, counts, found.data_parallel(0), experts.data_first(models))
    if len(models) > 1 and (known or folder.experts):
        raise UserError(
            f"{folder.path} has experts on {len(models)} tensor- or pipeline-parallel ranks, which no converter takes: "
            "resume on the same ranks"
        )
    if bool(known) != bool(folder.experts):
        raise UserError(
            f"{folder.path} has {len(folder.experts)} files layer_*_expert_* and {len(known)} parameters of experts in "
            f"{path.name}: expected both, or none"
        )
    if known:
        by_name: dict[str, Shape] = {}
        for _, file in _read_models(found, folder.experts, trust):
            by_name |= {name: tensor.shape for name, tensor in file.items() if isinstance(tensor, TensorHeader)}
        experts.check_local(
            folder.path, known, {name: shape for group in shapes for name, shape in group.items()}, by_name
        )
    return known


# Stage 3, where the files of all ranks state which experts they have


def _stage_3(found: Zero, trust: bool, _inject_missing_state: bool) -> Source:
    folder, tp_degree = found.folder, 1 + max(mp for _, mp in found.ranks)
    names = folder.zero3_models()
    _check_models(found, names, tp_degree)
    with_layers = [own for own in found.models.values() if experts.layers_of(folder.path / own.name, own.value)]
    models: list[Model] = []
    known: dict[str, Experts] = {}
    if with_layers:
        models = _read_models(found, [names[rank] for rank in sorted(names)], trust)
        known = _autoep_3(models, tp_degree)
    rest = [name for name in folder.names if name.endswith("model_states.pt") and name not in names.values()]
    return Source(
        zero=found,
        tp_degree=tp_degree,
        slices=_slices(found, tp_degree),
        info=found.model(0).get(INFO) or {},
        optimizer_state=_common(found, trust),
        copied=() if known else (*names.values(), *rest),
        rewritten=tuple(
            (path.name, experts.with_layers(value, experts.layers_of(path, value), PATTERN_3)) for path, value in models
        ),
        experts=known,
    )


def _check_models(found: Zero, names: Mapping[tuple[int, int], str], tp_degree: int) -> None:
    for rank in range(tp_degree):
        for dp in range(found.data_parallel(rank)):
            if (dp, rank) not in names:
                expected = found.folder.path / zero.model_name(dp, rank)
                raise UserError(f"{expected} is missing: expected a file of model states of each rank")


def _autoep_3(models: Sequence[Model], tp_degree: int) -> dict[str, Experts]:
    """The parameters of AutoEP's layers by name."""
    path = models[0][0]
    _check_experts(models, tp_degree)
    layers = [experts.layers_of_stage_3(*model) for model in models]
    ranks = experts.ranks_by_layers(path, layers)
    known = experts.parameters(path, layers[0], ranks)
    for (other, value), of_rank in zip(models, layers, strict=True):
        if experts.parameters(other, of_rank, ranks) != known:
            raise UserError(f"{other} and {path} contradict each other about the experts")
        frozen = sorted(known.keys() & (value.get("frozen_param_shapes") or {}).keys())
        if frozen:
            raise UserError(f"{other}: the experts {', '.join(frozen)} are frozen, and in no file of ZeRO's")
    return known
