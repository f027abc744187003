"""Megatron's `torch` format, judged: the buckets of all parameters, and the model's weights."""

from pathlib import Path

from ckpt_patches.audit import damages, torch_files
from ckpt_patches.audit.checkpoint import WEIGHT, Checkpoint, Shard
from ckpt_patches.audit.damages import Finding
from ckpt_patches.audit.megatron import STATES, param_groups, set_run
from ckpt_patches.formats.megatron_torch import MODEL, OPTIMIZER, buckets, folders, weights
from ckpt_patches.formats.torch_file import TensorHeader


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint; what is wrong with its files is among the findings."""
    found = Checkpoint(path, "megatron torch")
    for folder in folders(path):
        label = "" if folder == path else folder.name
        _read_model(found, folder, label)
        if not (folder / OPTIMIZER).exists():
            found.findings.append(Finding(damages.BAD_FILE, f"{label}/{OPTIMIZER}", detail="the file is missing"))
            continue
        for name, bucket in buckets(torch_files.read(folder / OPTIMIZER, found)):
            tensors = {role: bucket[key] for key, role in STATES.items() if isinstance(bucket.get(key), TensorHeader)}
            sizes = {tensor.numel for tensor in tensors.values()}
            if len(sizes) != 1 or len(tensors) != len(set(STATES.values())):
                detail = ", ".join(f"{role}: {tensor.numel}" for role, tensor in tensors.items()) or "no state"
                found.findings.append(Finding(damages.MISSING_ARRAY, name, label, detail=detail))
            streams = {
                role: stream
                for role, tensor in tensors.items()
                if (stream := torch_files.stream(found, folder / OPTIMIZER, f"{name}.{role}", tensor))
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
    for name, tensor in weights(value.get("model")):
        if (stream := torch_files.stream(found, path, name, tensor)) is not None and tensor.numel:
            found.shards.append(Shard(name, label, tensor.shape, {WEIGHT: stream}))
