"""Megatron's `torch` format: a folder per tensor-parallel rank, with its model and the gathered optimizer state.

`mp_rank_*/distrib_optim.pt` holds the states of each bucket of many parameters, nested by optimizer, buffer, dtype and
bucket. `mp_rank_*/model_optim_rng.pt` holds the model's weights and the optimizer's param groups.
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
ALIGNMENT = 64  # elements; each parameter begins at a multiple
MOST_DEPTH = 5  # of chained optimizers, buffers and dtypes
RANK = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")  # tensor-, pipeline-, expert-parallel


def folders(path: Path) -> list[Path]:
    """The folders of the tensor-parallel ranks, or `path` if it is one; empty if `path` has another format."""
    if (path / OPTIMIZER).exists():
        return [path]
    found = sorted(path.glob("mp_rank_*"))
    return found if any((folder / OPTIMIZER).exists() for folder in found) else []


def is_without_distributed_optimizer(path: Path) -> bool:
    """Whether no rank has `distrib_optim.pt`, and the run's arguments disable the distributed optimizer."""
    found = sorted(path.glob("mp_rank_*"))
    if not found or any((own / OPTIMIZER).exists() or not (own / MODEL).exists() for own in found):
        return False
    with contextlib.suppress(UserError):
        value = torch_file.read(found[0] / MODEL, trust=True).value  # runs no code: unknown classes are stubs
        arguments = value.get("args") if isinstance(value, dict) else None
        return isinstance(arguments, torch_file.Instance) and arguments.fields.get("use_distributed_optimizer") is False
    return False


def buckets(value: Any) -> dict[str, dict[str, TensorHeader]]:
    """The states of each bucket (or parameter) in the value of `distrib_optim.pt`, by the path in it."""
    found: dict[str, dict[str, TensorHeader]] = {}
    for name, tensor in tensors_in(value):
        bucket, _, state = name.rpartition(".")
        if state in STATES:
            found.setdefault(bucket, {})[state] = tensor
    return found


def coalesced(value: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the entry for each dtype's buckets, in a file that stores them coalesced."""
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
    """The elements without padding that a file states for its coalesced buckets."""
    return sum(numel for own in coalesced(value) if type(numel := own.get(UNPADDED)) is int)


def aligned(numels: Iterable[int]) -> int:
    """The most elements that parameters take in their buckets, with alignment."""
    return sum(-(-numel // ALIGNMENT) * ALIGNMENT for numel in numels)
