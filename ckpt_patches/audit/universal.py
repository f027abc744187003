"""DeepSpeed's universal checkpoints, judged: each parameter's arrays against the model's shapes and weights."""

import math
from pathlib import Path
from typing import Any

from ckpt_patches.audit import damages, torch_files
from ckpt_patches.audit.checkpoint import EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHT, Checkpoint, Shard, Stream
from ckpt_patches.audit.damages import Finding
from ckpt_patches.formats import universal
from ckpt_patches.formats.torch_file import TensorHeader
from ckpt_patches.formats.zero import MODEL

STATES = {MASTER: "fp32", EXP_AVG: "exp_avg", EXP_AVG_SQ: "exp_avg_sq"}


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint; what is wrong with its files is among the findings."""
    found = Checkpoint(path, "deepspeed universal")
    models = _models(found)
    shapes = {
        name: tuple(shape)
        for _, value in models[:1]
        for group in value.get("param_shapes") or []
        for name, shape in group.items()
    }
    if (path / "tmp").exists():
        found.findings.append(
            Finding(damages.INTERRUPTED, "tmp", detail="the converter's temporary folder is still there")
        )
    parameters = universal.parameters(path)
    for name in sorted(shapes.keys() - set(parameters)):
        found.findings.append(Finding(damages.INTERRUPTED, name, detail="not there, and the model has it"))
    for name in parameters:
        _read_parameter(found, name, shapes.get(name), models)
    steps = [step for name in parameters if (step := _step(found, name)) is not None]
    found.step = int(max(steps)) if steps else None
    return found


def _models(found: Checkpoint) -> list[tuple[Path, dict[str, Any]]]:
    """The files with the model's weights, one for each tensor-parallel rank."""
    paths = [path for path in sorted(found.path.iterdir()) if MODEL.fullmatch(path.name)]
    if not paths:
        found.findings.append(Finding(damages.INTERRUPTED, "mp_rank_*_model_states.pt", detail="not there"))
    values = [(path, torch_files.read(path, found)) for path in paths]
    return [(path, value) for path, value in values if isinstance(value, dict)]


def _step(found: Checkpoint, name: str) -> float | None:
    path = found.path / universal.state_file(name, "step")
    return torch_files.scalar(path, torch_files.read(path, found)) if path.exists() else None


def _read_parameter(
    found: Checkpoint,
    name: str,
    shape: tuple[int, ...] | None,
    models: list[tuple[Path, dict[str, Any]]],
) -> None:
    streams: dict[str, Stream] = {}
    for role, key in STATES.items():
        path, file = found.path / universal.state_file(name, key), f"{key}.pt"
        if not path.exists():
            found.findings.append(Finding(damages.MISSING_ARRAY, f"{name}/{file}"))
            continue
        value = torch_files.read(path, found)
        if (tensor := universal.tensor_of(value)) is None:
            continue
        if shape is not None and not _fits(tensor, shape, len(models), value):
            detail = f"{tensor.numel} elements, {math.prod(shape)} in the model's shape {shape}"
            found.findings.append(Finding(damages.ELEMENT_COUNT, f"{name}/{file}", detail=detail))
        elif (stream := torch_files.stream(found, path, f"{name}/{file}", tensor)) is not None:
            streams[role] = stream
    found.shards += _shards(found, name, streams, shape, models)


def _shards(
    found: Checkpoint,
    name: str,
    streams: dict[str, Stream],
    shape: tuple[int, ...] | None,
    models: list[tuple[Path, dict[str, Any]]],
) -> list[Shard]:
    """The arrays of a parameter together, if they have the same number of elements."""
    sizes = {stream.numel for stream in streams.values()}
    if len(sizes) != 1:
        return [Shard(name, role, (stream.numel,), {role: stream}) for role, stream in streams.items()]
    (numel,) = sizes
    if len(models) == 1:
        path, model = models[0]
        weight = (model.get("module") or {}).get(name)
        own = torch_files.stream(found, path, name, weight)
        if own is not None and own.numel == numel:
            streams[WEIGHT] = own
    return [Shard(name, "", shape if shape is not None and math.prod(shape) == numel else (numel,), streams)]


def _fits(found: TensorHeader, shape: tuple[int, ...], models: int, value: Any) -> bool:
    """Whether an array is a parameter's, whose shape is that of one of the tensor-parallel ranks."""
    if models == 1:
        return found.numel == math.prod(shape)
    is_vocabulary = isinstance(value, dict) and universal.VOCABULARY in value
    return is_vocabulary or found.numel in (math.prod(shape), models * math.prod(shape))
