"""What a conversion takes from a ZeRO folder: the slices of each parameter, and what is saved beside them.

The first problem of the folder's model is an error here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ckpt_patches.convert.reading import Records
from ckpt_patches.errors import NothingToDo, UserError
from ckpt_patches.formats import settings, torch_file, zero, zero_experts, zero_folder, zero_inventory
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.torch_file import TensorHeader, TorchFile
from ckpt_patches.formats.zero import OPTIMIZER_STATE, Folder, Shape
from ckpt_patches.formats.zero_experts import LocalExpert
from ckpt_patches.formats.zero_folder import Slice, Zero
from ckpt_patches.runtime.processes import mapped
from ckpt_patches.runtime.shown import shown

INFO = "universal_checkpoint_info"
HAND_OVER = "python -m deepspeed_patches.ds_to_universal --inject_missing_state"
WORTH_A_PROCESS = 128  # files; starting a process and receiving its results takes as long as reading some of these
# Left out of the common state at stages 1 and 2.
SHARDED = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups")

Wanted = TypeVar("Wanted")


class UpstreamsAloneError(UserError):
    """A kind of checkpoint that DeepSpeed's own converter converts, and this one does not."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}; convert it with DeepSpeed's own converter: CKPT_PATCHES_SKIP=universal_converter python -m "
            "deepspeed.checkpoint.ds_to_universal"
        )


@dataclass(frozen=True)
class Source:
    """A checkpoint to convert."""

    zero: Zero
    tp_degree: int
    slices: dict[str, dict[int, list[Slice]]]  # by parameter and model-parallel rank; several: of experts
    info: dict[str, Any]  # `universal_checkpoint_info`
    optimizer_state: dict[str, Any] = field(default_factory=dict)  # of the first rank, without sharded values
    records: Sequence[Records] = ()  # of each file that is read
    copied: tuple[str, ...] = ()  # names of files that a universal checkpoint has unchanged
    experts: Mapping[str, LocalExpert] = field(default_factory=dict)  # of `deepspeed.moe`, by parameter


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
    records: dict[str, Records] = {}  # by file

    def read_one(name: str, wanted: Callable[[TorchFile], Wanted]) -> tuple[Records, Wanted]:
        file = torch_file.read(path / name, trust=trust)
        return (str(file.path), file.storages), wanted(file)

    def read_all(names: Sequence[str], wanted: Callable[[TorchFile], Wanted]) -> list[Wanted]:
        read = mapped(partial(read_one, wanted=wanted), names, WORTH_A_PROCESS)
        records.update({name: own for name, (own, _) in zip(names, read, strict=True)})
        return [found for _, found in read]

    found = zero_folder.read(folder, read_all)
    _refuse(path, zero_inventory.blocking(found.problems))
    if not found.models:
        raise UserError(f"{path} has no file like mp_rank_00_model_states.pt")
    for own in found.models.values():
        if any(own.value.get(key) for key in zero_experts.AUTOEP):
            raise UpstreamsAloneError(f"{path / own.name} has experts of AutoEP")
    is_stage_3 = found.stage > 2
    tp_degree = _tp_degree(found)
    experts = {} if is_stage_3 else _experts(found, trust)
    if is_stage_3:
        _check_model_files(found, tp_degree)
    else:
        _check_groups_of_stages(found)
    models = [own.name for own in found.models.values()]
    rest = [name for name in folder.names if name.startswith("mp") or name.endswith("model_states.pt")]
    rest = [name for name in rest if name not in models and (name.startswith("mp") or is_stage_3)]
    copied = (*models, *rest, *(folder.experts if experts else ()))
    read_all([name for name in copied if name not in records], lambda _: None)
    return Source(
        zero=found,
        tp_degree=tp_degree,
        slices=_slices(found, tp_degree if is_stage_3 else len(found.models)),
        info=_info(found, may_lack=is_stage_3 or inject_missing_state or tp_degree == 1),
        optimizer_state=_common(found, trust),
        records=tuple(records.values()),
        copied=copied,
        experts=experts,
    )


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
        groups = zero_folder.shapes_of(found.model(model_rank))
        slices, problems = zero_folder.slices(found, model_rank, groups)
        _refuse(found.folder.path, problems)
        shapes = {name: shape for group in groups for name, shape in group.items()}
        for name in shapes:
            by_name.setdefault(name, {})
        for own in slices:
            if not shapes:
                raise UserError(
                    f"{found.folder.path}: expected the shapes of the parameters (param_shapes) in the file of model "
                    f"states of model-parallel rank {model_rank}, found none, and no converter can tell where each "
                    "parameter ends: resume on the same ranks"
                )
            if contradiction := own.contradiction:
                where = f" of model-parallel rank {model_rank}" if model_ranks > 1 else ""
                raise UserError(f"{found.folder.path} is damaged or incomplete: {own.name}{where}: {contradiction}")
            by_name.setdefault(own.name, {}).setdefault(model_rank, []).append(own)
        every = tuple(range(found.data_parallel(model_rank)))
        for name, shape in shapes.items():
            by_name[name].setdefault(model_rank, [Slice(name, model_rank, every, shape)])  # without elements
    return by_name


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


def _tp_degree(found: Zero) -> int:
    """The tensor-parallel degree, as the checkpoint states or from the files of the first layer.

    Raises:
        UserError: the checkpoint states no number of ranks.
    """
    if found.stage > 2:
        return 1 + max(mp for _, mp in found.ranks)
    said = found.model(0).get("checkpoint_parallel_dimensions")
    if isinstance(said, dict):
        if degree := zero_inventory.count_of(said.get("tp_degree")):
            return degree
        raise UserError(
            f"{found.folder.path}: expected a number of ranks as tp_degree, found {shown(said.get('tp_degree'))}"
        )
    return len(found.folder.starting_with("layer_01")) or len(found.models)


def _info(found: Zero, *, may_lack: bool) -> dict[str, Any]:
    """How parameters are split over tensor-parallel ranks. Can be absent with one tensor-parallel rank."""
    info = found.model(0).get(INFO)
    if info is None and may_lack:
        return {}
    if not isinstance(info, dict):
        raise UserError(
            f"{found.folder.path / next(iter(found.models.values())).name} has no {INFO}, which the training program "
            f"has to put there; if no parameter is parallel in its tensors: {HAND_OVER}"
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


def _check_model_files(found: Zero, tp_degree: int) -> None:
    names = found.folder.zero3_models()
    for rank in range(tp_degree):
        for dp in range(found.data_parallel(rank)):
            if (dp, rank) not in names:
                expected = found.folder.path / zero.model_name(dp, rank)
                raise UserError(f"{expected} is missing: expected a file of model states of each rank")


def _experts(found: Zero, trust: bool) -> dict[str, LocalExpert]:
    """The experts' parameters in layers of `deepspeed.moe`, by their names in the ranks' files."""
    folder, model = found.folder, found.model(0)
    path = folder.path / next(iter(found.models.values())).name
    if folder.experts and "param_shapes" not in model:
        raise UserError(
            f"{path} does not record which shapes the parameters have (param_shapes): before 0.19.3 DeepSpeed saved no "
            "checkpoint of experts that can be converted; resume on the same ranks with a later one, and convert what "
            "it saves"
        )
    shapes = zero_folder.shapes_of(model)
    counts = found.of(0)[0].data_parallel
    neighbours = zero_experts.shares_with_neighbours(model)
    known = zero_experts.local_experts(path, shapes, counts, found.data_parallel(0), neighbours)
    if len(found.models) > 1 and (known or folder.experts):
        raise UserError(
            f"{folder.path} has experts on {len(found.models)} tensor- or pipeline-parallel ranks, which no converter "
            "takes: resume on the same ranks"
        )
    if bool(known) != bool(folder.experts):
        raise UserError(
            f"{folder.path} has {len(folder.experts)} files layer_*_expert_* and {len(known)} parameters of experts in "
            f"{path.name}: expected both, or none"
        )
    files: dict[str, Shape] = {}
    for name in folder.experts if known else ():
        value = torch_file.read(folder.path / name, trust=trust).value
        files |= {key: tensor.shape for key, tensor in value.items() if isinstance(tensor, TensorHeader)}
    own = {name: shape for group in shapes for name, shape in group.items()}
    zero_experts.check_local(folder.path, known, own, files)
    return known
