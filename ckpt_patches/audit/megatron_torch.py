"""Megatron's `torch` format: `mp_rank_*/distrib_optim.pt`, the buckets of all parameters, gathered on one rank."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckpt_patches.audit import damages, torch_files
from ckpt_patches.audit.checkpoint import WEIGHT, Checkpoint, Shard
from ckpt_patches.audit.damages import Finding
from ckpt_patches.audit.megatron import STATES, param_groups, set_run

OPTIMIZER, MODEL = "distrib_optim.pt", "model_optim_rng.pt"


def is_megatron_torch(path: Path) -> bool:
    return (path / OPTIMIZER).exists() or any(path.glob(f"mp_rank_*/{OPTIMIZER}"))


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint; what is wrong with its files is among the findings."""
    found = Checkpoint(path, "megatron torch")
    for folder in [path] if (path / OPTIMIZER).exists() else sorted(path.glob("mp_rank_*")):
        label = "" if folder == path else folder.name
        _read_model(found, folder, label)
        if not (folder / OPTIMIZER).exists():
            found.findings.append(Finding(damages.BAD_FILE, f"{label}/{OPTIMIZER}", detail="the file is missing"))
            continue
        for name, bucket in _buckets(torch_files.read(folder / OPTIMIZER, found), ()):
            tensors = {role: bucket[key] for key, role in STATES.items() if torch_files.is_tensor(bucket.get(key))}
            sizes = {tensor.numel for tensor in tensors.values()}
            if len(sizes) != 1 or len(tensors) != len(set(STATES.values())):
                detail = ", ".join(f"{role}: {tensor.numel}" for role, tensor in tensors.items()) or "no state"
                found.findings.append(Finding(damages.MISSING_ARRAY, name, label, detail=detail))
            streams = {
                role: stream
                for role, tensor in tensors.items()
                if (stream := torch_files.stream(folder / OPTIMIZER, f"{name}.{role}", tensor))
            }
            if len(sizes) == 1:
                found.shards.append(Shard(name, label, (sizes.pop(),), streams, has_rows=False))
    return found


def _read_model(found: Checkpoint, folder: Path, label: str) -> None:
    """The model's weights, and the optimizer's step."""
    path = folder / MODEL
    if not path.exists():
        found.findings.append(Finding(damages.BAD_FILE, f"{label}/{MODEL}".lstrip("/"), detail="the file is missing"))
        return
    value = torch_files.read(path, found)
    if not isinstance(value, dict):
        return
    set_run(found, param_groups(value.get("optimizer")), value.get("args"))
    for name, tensor in _tensors(value.get("model"), ""):
        if (stream := torch_files.stream(path, name, tensor)) is not None and tensor.numel:
            found.shards.append(Shard(name, label, tensor.shape, {WEIGHT: stream}))


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if torch_files.is_tensor(value):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(inner, f"{name}.{key}".lstrip("."))


def _buckets(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The dicts with a parameter's or a bucket's states, wherever they are, by their place."""
    if isinstance(value, dict) and any(torch_files.is_tensor(value.get(key)) for key in STATES):
        yield ".".join(path), value
    elif isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from _buckets(inner, (*path, _name(key)))


def _name(key: Any) -> str:
    """Keys are numbers, and pairs of types."""
    if isinstance(key, tuple):
        return "(" + ", ".join(getattr(part, "__name__", str(part)) for part in key) + ")"
    return str(key)
