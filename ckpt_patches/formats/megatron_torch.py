"""Megatron's `torch` format: a folder for each tensor-parallel rank: its model, and the gathered optimizer's state.

`mp_rank_*/distrib_optim.pt` holds, nested by optimizer, buffer, type of elements and bucket, the states of each bucket
of many parameters; `mp_rank_*/model_optim_rng.pt` the model's weights and the optimizer's groups.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ckpt_patches.errors import UserError
from ckpt_patches.formats import torch_file
from ckpt_patches.formats.torch_file import TensorHeader, tensors_in

OPTIMIZER, MODEL = "distrib_optim.pt", "model_optim_rng.pt"
STATES = ("param", "exp_avg", "exp_avg_sq")
COALESCED, UNPADDED = "buckets_coalesced", "numel_unpadded"
ALIGNMENT = 64  # elements, where each parameter begins
MOST_DEPTH = 5  # of optimizers in a chain, buffers and types
RANK = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")  # tensor-, pipeline-, expert-parallel


def folders(path: Path) -> list[Path]:
    """Those of the tensor-parallel ranks; the folder itself, where it is one; none, where it is no such checkpoint."""
    if (path / OPTIMIZER).exists():
        return [path]
    found = sorted(path.glob("mp_rank_*"))
    return found if any((folder / OPTIMIZER).exists() for folder in found) else []


def is_without_distributed_optimizer(path: Path) -> bool:
    """Whether each rank's folder has one file alone, and the run's arguments in the first say that this is all."""
    found = sorted(path.glob("mp_rank_*"))
    if not found or any((own / OPTIMIZER).exists() or not (own / MODEL).exists() for own in found):
        return False
    with contextlib.suppress(UserError):
        value = torch_file.read(found[0] / MODEL, trust=True).value  # runs nothing: unknown classes are stand-ins
        arguments = value.get("args") if isinstance(value, dict) else None
        return isinstance(arguments, torch_file.Instance) and arguments.fields.get("use_distributed_optimizer") is False
    return False


def buckets(value: Any) -> dict[str, dict[str, TensorHeader]]:
    """The states of each bucket (or parameter) in what `distrib_optim.pt` holds, by its place in it."""
    found: dict[str, dict[str, TensorHeader]] = {}
    for name, tensor in tensors_in(value):
        bucket, _, state = name.rpartition(".")
        if state in STATES:
            found.setdefault(bucket, {})[state] = tensor
    return found


def coalesced(value: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """What a file says of all buckets of one type of elements, where it has them as one."""
    if not isinstance(value, (dict, list)) or depth > MOST_DEPTH:
        return
    items = list(value.values()) if isinstance(value, dict) else value
    if isinstance(value, dict) and value.get(COALESCED):
        of_buffers = [own for own in items if isinstance(own, dict)]
        yield from (own for buffer in of_buffers for own in buffer.values() if isinstance(own, dict))
        return
    for item in items:
        yield from coalesced(item, depth + 1)


def unpadded(value: Any) -> int:
    """The elements that all buckets of a file are said to have."""
    return sum(numel for own in coalesced(value) if type(numel := own.get(UNPADDED)) is int)


def aligned(numels: Iterable[int]) -> int:
    """The elements that parameters take in their buckets at the most."""
    return sum(-(-numel // ALIGNMENT) * ALIGNMENT for numel in numels)
