"""Megatron's `torch` format, judged: the buckets of all parameters, and the model's weights."""

from pathlib import Path
from typing import Any

from ckpt_patches.audit import damages
from ckpt_patches.audit.damages import Finding
from ckpt_patches.audit.readers import tensor_streams
from ckpt_patches.audit.readers.checkpoint import Checkpoint, Shard
from ckpt_patches.audit.readers.megatron_arrays import STATES, check_iteration, check_promises, param_groups, set_run
from ckpt_patches.formats.megatron_torch import MODEL, OPTIMIZER, buckets, folders
from ckpt_patches.formats.torch_file import TorchFile


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint; what is wrong with its files is among the findings."""
    found = Checkpoint(path, "megatron torch")
    for folder in folders(path):
        label = "" if folder == path else folder.name
        _read_model(found, folder, label)
        if not (folder / OPTIMIZER).exists():
            found.findings.append(Finding(damages.BAD_FILE, f"{label}/{OPTIMIZER}", detail="the file is missing"))
            continue
        judge_buckets(found, folder / OPTIMIZER, label, tensor_streams.read(folder / OPTIMIZER, found))
    check_promises(found, ())
    return found


def judge_object(found: Checkpoint, file: TorchFile, name: str) -> None:
    """An object among sharded tensors, a list of one or bare: the buckets' states, or the optimizer's groups."""
    value = file.value[0] if isinstance(file.value, list) and len(file.value) == 1 else file.value
    judge_buckets(found, file.path, "", value, name)
    if not found.step and (groups := param_groups(value)):
        set_run(found, groups, None)


def judge_buckets(found: Checkpoint, path: Path, label: str, value: Any, prefix: str = "") -> None:
    """Add a shard for each bucket in what a file holds."""
    for place, bucket in buckets(value).items():
        name = f"{prefix}.{place}".strip(".")
        tensors = {role: bucket[key] for key, role in STATES.items() if key in bucket}
        sizes = {tensor.numel for tensor in tensors.values()}
        if len(sizes) != 1 or len(tensors) != len(set(STATES.values())):
            detail = ", ".join(f"{role}: {tensor.numel}" for role, tensor in tensors.items())
            found.findings.append(Finding(damages.MISSING_ARRAY, name, label, detail=detail))
        streams = {
            role: stream
            for role, tensor in tensors.items()
            if (stream := tensor_streams.stream(found, path, f"{name}.{role}", tensor))
        }
        if len(sizes) == 1:
            found.shards.append(Shard(name, label, (sizes.pop(),), streams, has_rows=False))


def _read_model(found: Checkpoint, folder: Path, label: str) -> None:
    """The optimizer's step; the weights are judged with all that a file holds."""
    path = folder / MODEL
    if not path.exists():
        found.findings.append(Finding(damages.BAD_FILE, f"{label}/{MODEL}".lstrip("/"), detail="the file is missing"))
        return
    value = tensor_streams.read(path, found)
    if not isinstance(value, dict):
        return
    set_run(found, param_groups(value.get("optimizer")), value.get("args"))
    if not any(str(key).startswith("model") for key in value):
        detail = "no weights of the model"
        found.findings.append(Finding(damages.MISSING_WEIGHT, f"{label}/{MODEL}".lstrip("/"), detail=detail))
    check_iteration(found, value, f"{label}/{MODEL}".lstrip("/"))
