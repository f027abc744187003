"""Megatron's `torch` format: a folder for each tensor-parallel rank: its model, and the gathered optimizer's state.

`mp_rank_*/distrib_optim.pt` holds, nested by optimizer, buffer, type of elements and bucket, the states of each bucket
of many parameters; `mp_rank_*/model_optim_rng.pt` the model's weights and the optimizer's groups.
"""

from pathlib import Path
from typing import Any

from ckpt_patches.formats.torch_file import TensorHeader, tensors_in

OPTIMIZER, MODEL = "distrib_optim.pt", "model_optim_rng.pt"
STATES = ("param", "exp_avg", "exp_avg_sq")


def folders(path: Path) -> list[Path]:
    """Those of the tensor-parallel ranks; the folder itself, where it is one; none, where it is no such checkpoint."""
    if (path / OPTIMIZER).exists():
        return [path]
    found = sorted(path.glob("mp_rank_*"))
    return found if any((folder / OPTIMIZER).exists() for folder in found) else []


def buckets(value: Any) -> dict[str, dict[str, TensorHeader]]:
    """The states of each bucket (or parameter) in what `distrib_optim.pt` holds, by its place in it."""
    found: dict[str, dict[str, TensorHeader]] = {}
    for name, tensor in tensors_in(value):
        bucket, _, state = name.rpartition(".")
        if state in STATES:
            found.setdefault(bucket, {})[state] = tensor
    return found
