"""DeepSpeed's ZeRO checkpoints: a file of optimizer state for each data-parallel rank, with flat partitions.

Stage 1 and 2 flatten a parameter group and cut it in equal partitions; `param_slice_mappings` says which fragment of
which parameter begins where in a rank's partition. Stage 3 cuts each parameter in ceil(numel / ranks) elements a rank.
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_patches.audit import damages, torch_files
from ckpt_patches.audit.checkpoint import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    MOMENTS,
    WEIGHT,
    Checkpoint,
    Extent,
    Owner,
    Shard,
    Stream,
)
from ckpt_patches.audit.damages import Finding
from ckpt_patches.formats import torch_file

OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
STATES = {MASTER: "fp32", EXP_AVG: "exp_avg", EXP_AVG_SQ: "exp_avg_sq"}


def is_zero(path: Path) -> bool:
    return any(OPTIMIZER.fullmatch(file.name) for file in path.iterdir())


@dataclass
class RankFile:
    """The optimizer's state of one rank, by group."""

    path: Path
    rank: int
    stage: int
    ranks: int | None  # the data-parallel size that the file tells of
    step: float | None
    beta1: float | None
    masters: list[torch_file.TensorHeader]
    moments: list[dict[str, torch_file.TensorHeader]]
    paddings: list[int]
    fragments: list[dict[str, tuple[int, int]]]  # by group, of each parameter: the first element, the number


@dataclass
class Piece:
    """A parameter's elements on one rank: in which file, and where in which tensor of each state."""

    file: RankFile
    numel: int
    tensors: dict[str, tuple[torch_file.TensorHeader, int]]  # by role, with the first element


@dataclass
class Parameter:
    """A parameter's pieces, in the order of its elements."""

    shape: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint; what is wrong with its files is among the findings."""
    found = Checkpoint(path, "deepspeed zero")
    by_model: dict[str, dict[int, Path]] = {}
    for file in sorted(path.iterdir()):
        if match := OPTIMIZER.fullmatch(file.name):
            by_model.setdefault(match[2], {})[int(match[1])] = file
    for model_rank, files in sorted(by_model.items()):
        _read_model_rank(found, model_rank, files)
    return found


def _read_model_rank(found: Checkpoint, model_rank: str, paths: dict[int, Path]) -> None:
    """All that belongs to one tensor-parallel rank."""
    module, info, module_path = _model_states(found, model_rank)
    files = [file for rank, path in sorted(paths.items()) if (file := _rank_file(found, rank, path))]
    if not files:
        return
    _check_ranks(found, files, paths, info)
    _check_paddings(found, files)
    label = f"mp_rank_{model_rank}" if len(info) and info.get("mp_world_size", 1) > 1 else ""
    parameters = _stage3(found, files, info) if files[0].stage == 3 else _stage12(found, files, info)
    for name, parameter in parameters.items():
        numel = sum(piece.numel for piece in parameter.pieces)
        if numel != math.prod(parameter.shape):
            detail = f"{numel} elements in all fragments, {math.prod(parameter.shape)} in the model's shape"
            found.findings.append(Finding(damages.FRAGMENTS, name, label, detail=detail))
        else:
            weight = module.get(name) if files[0].stage < 3 else None
            found.shards.append(_shard(name, label, parameter, weight, module_path))
    for name, tensor in module.items():
        if torch_files.is_tensor(tensor) and name not in parameters and tensor.is_contiguous and tensor.numel:
            stream = Stream(name, tensor.dtype, (torch_files.extent(module_path, tensor),))
            found.shards.append(Shard(name, label, tensor.shape, {WEIGHT: stream}))


def _model_states(found: Checkpoint, model_rank: str) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """The model's weights, the rest of the first file with them, and its path."""
    for path in sorted(found.path.iterdir()):
        match = MODEL.fullmatch(path.name)
        if match and match[2] == model_rank and int(match[1] or 0) == 0:
            value = torch_files.read(path, found)
            if isinstance(value, dict):
                module = value.get("module")
                return module if isinstance(module, dict) else {}, value, path
            return {}, {}, path
    found.findings.append(
        Finding(damages.BAD_FILE, f"mp_rank_{model_rank}_model_states.pt", detail="the file is missing")
    )
    return {}, {}, found.path


def _rank_file(found: Checkpoint, rank: int, path: Path) -> RankFile | None:
    """What a rank's file holds; a finding if it is not whole."""
    value = torch_files.read(path, found)
    if value is None:
        return None
    try:
        return _parse(rank, path, value["optimizer_state_dict"])
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        detail = f"not as DeepSpeed writes it: {type(error).__name__}: {error}"
        found.findings.append(Finding(damages.BAD_FILE, path.name, detail=detail))
        return None


def _parse(rank: int, path: Path, state: dict[str, Any]) -> RankFile:
    stage = state.get("zero_stage", 1)  # BF16_Optimizer does not say
    stage = int(stage.args[0] if isinstance(stage, torch_file.Instance) else stage)
    base = state["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
    entries = list(base["state"].values()) if isinstance(base, dict) else list(base)
    groups = base.get("param_groups", []) if isinstance(base, dict) else []
    steps = [entry.get("step") for entry in entries] + [group.get("step") for group in groups]
    count = state.get("partition_count")
    return RankFile(
        path=path,
        rank=rank,
        stage=stage,
        ranks=max(count) if isinstance(count, list) else count,
        step=max((s for value in steps if (s := torch_files.scalar(path, value)) is not None), default=None),
        beta1=max((group["betas"][0] for group in groups if "betas" in group), default=None),
        masters=list(state["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"]),
        moments=[{key: entry[key] for key in MOMENTS if key in entry} for entry in entries],
        paddings=[int(padding) for padding in state.get("group_paddings") or []],
        fragments=[_fragments(mapping) for mapping in state.get("param_slice_mappings") or []],
    )


def _fragments(mapping: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Where each parameter's fragment lies in a partition."""
    addresses = {name: _address(value) for name, value in mapping.items()}
    return {name: (int(address["start"]), int(address["numel"])) for name, address in addresses.items()}


def _address(value: Any) -> dict[str, Any]:
    """The fields of a fragment_address, a dataclass."""
    return (
        value.fields
        if isinstance(value, torch_file.Instance) and value.fields
        else dict(zip(("numel", "start"), value.args, strict=True))
    )


def _check_ranks(found: Checkpoint, files: list[RankFile], paths: dict[int, Path], info: dict[str, Any]) -> None:
    """Every rank's file, and all of one save."""
    sizes = {file.ranks for file in files if file.ranks is not None}
    expected = info.get("dp_world_size") or max(sizes, default=None) or max(paths) + 1
    found.data_parallel = int(expected)
    for rank in sorted(set(range(found.data_parallel)) - paths.keys()):
        found.findings.append(Finding(damages.MISSING_RANK, f"rank {rank} of {expected}"))
    for file in files:
        if file.rank >= found.data_parallel or file.ranks not in (None, found.data_parallel):
            detail = f"of {file.ranks} ranks, expected {found.data_parallel}"
            found.findings.append(Finding(damages.MIXED_RANKS, file.path.name, detail=detail))
    steps = {file.step for file in files if file.step is not None}
    found.step = int(max(steps)) if steps else 0
    found.beta1 = files[0].beta1
    if len(steps) > 1:
        for file in files:
            if file.step != max(steps):
                detail = f"step {file.step}, others are at {max(steps)}"
                found.findings.append(Finding(damages.MIXED_STEPS, file.path.name, detail=detail))


def _check_paddings(found: Checkpoint, files: list[RankFile]) -> None:
    for file in files:
        for group, (padding, master) in enumerate(zip(file.paddings, file.masters, strict=False)):
            numel = max(_partition(file, group), master.numel)
            if padding > numel:
                detail = f"group {group}: padding {padding}, partition {numel}"
                found.findings.append(Finding(damages.LARGE_PADDING, file.path.name, detail=detail))


def _partition(file: RankFile, group: int) -> int:
    """Elements of a rank's partition; the master may be without its padding."""
    sizes = [moment.numel for moment in file.moments[group].values()] if group < len(file.moments) else []
    return max(sizes, default=file.masters[group].numel)


def _stage12(found: Checkpoint, files: list[RankFile], info: dict[str, Any]) -> dict[str, Parameter]:
    shapes = {name: tuple(shape) for group in info.get("param_shapes") or [] for name, shape in group.items()}
    parameters: dict[str, Parameter] = {}
    for file in sorted(files, key=lambda file: file.rank):
        if file.rank >= (found.data_parallel or 0):
            continue
        for group, fragments in enumerate(file.fragments):
            _check_fragments(found, file, group, fragments)
            tensors = {MASTER: file.masters[group], **(file.moments[group] if group < len(file.moments) else {})}
            for name, (start, numel) in fragments.items():
                parameter = parameters.setdefault(name, Parameter(shapes.get(name, (0,))))
                parameter.pieces.append(Piece(file, numel, {role: (tensor, start) for role, tensor in tensors.items()}))
    for name in shapes.keys() - parameters.keys():
        if any(file.fragments for file in files):
            found.findings.append(Finding(damages.FRAGMENTS, name, detail="no rank has a fragment of it"))
    return parameters


def _check_fragments(found: Checkpoint, file: RankFile, group: int, fragments: dict[str, tuple[int, int]]) -> None:
    """Within the partition, and none over another."""
    at, last = 0, ""
    for name, (start, numel) in sorted(fragments.items(), key=lambda item: item[1]):
        if start < at:
            detail = f"{file.path.name}: begins at {start}, before the end of {last} at {at}"
            found.findings.append(Finding(damages.FRAGMENTS, name, detail=detail))
        at, last = max(at, start + numel), name
    if at > _partition(file, group):
        detail = f"{file.path.name}: ends at {at}, the partition at {_partition(file, group)}"
        found.findings.append(Finding(damages.FRAGMENTS, last, detail=detail))


def _stage3(found: Checkpoint, files: list[RankFile], info: dict[str, Any]) -> dict[str, Parameter]:
    """Each rank has ceil(numel / ranks) elements of every parameter in turn, the last ranks fewer, or none."""
    shapes = {name: tuple(shape) for group in info.get("param_shapes") or [] for name, shape in group.items()}
    ranks = found.data_parallel or len(files)
    expected = sum(-(-math.prod(shape) // ranks) for shape in shapes.values())
    parameters = {name: Parameter(shape) for name, shape in shapes.items()}
    for file in sorted(files, key=lambda file: file.rank):
        numel = sum(master.numel for master in file.masters)
        if numel != expected or len(file.masters) != 1:
            if numel != expected:
                detail = f"{file.path.name}: {numel} elements, {expected} by the model's shapes"
                found.findings.append(Finding(damages.FRAGMENTS, "all parameters", detail=detail))
            return {}
        tensors = {MASTER: file.masters[0], **file.moments[0]}
        at = 0
        for name, shape in shapes.items():
            part = -(-math.prod(shape) // ranks)
            own = max(min(part, math.prod(shape) - file.rank * part), 0)
            parameters[name].pieces.append(Piece(file, own, {role: (tensor, at) for role, tensor in tensors.items()}))
            at += part
    return parameters


def _shard(name: str, label: str, parameter: Parameter, weight: Any, module_path: Path) -> Shard:
    streams, owners, at = {}, [], 0
    pieces = [piece for piece in parameter.pieces if piece.numel]
    for role in STATES:
        if all(role in piece.tensors and _reaches(piece, role) for piece in pieces) and pieces:
            extents = tuple(_extent(piece, role) for piece in pieces)
            streams[role] = Stream(f"{name}.{STATES[role]}", pieces[0].tensors[role][0].dtype, extents)
    for piece in pieces:
        owners.append(Owner(f"rank {piece.file.rank}", at, at + piece.numel))
        at += piece.numel
    if torch_files.is_tensor(weight) and weight.is_contiguous and weight.shape == parameter.shape:
        streams[WEIGHT] = Stream(name, weight.dtype, (torch_files.extent(module_path, weight),))
    return Shard(name, label, parameter.shape, streams, tuple(owners) if len(owners) > 1 else ())


def _reaches(piece: Piece, role: str) -> bool:
    """Whether a tensor has the piece's elements; a master can have been cut by its padding, in a larger storage."""
    tensor, start = piece.tensors[role]
    return start + piece.numel <= tensor.storage.numel - tensor.start


def _extent(piece: Piece, role: str) -> Extent:
    tensor, start = piece.tensors[role]
    return torch_files.extent(piece.file.path, tensor, start, start + piece.numel)
