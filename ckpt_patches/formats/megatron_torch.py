"""Megatron's `torch` format: a folder for each tensor-parallel rank: its model, and the gathered optimizer's state.

`mp_rank_*/distrib_optim.pt` holds, nested by optimizer, buffer, type of elements and bucket, the states of each bucket
of many parameters; `mp_rank_*/model_optim_rng.pt` the model's weights and the optimizer's groups.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckpt_patches.formats.torch_file import TensorHeader

OPTIMIZER, MODEL = "distrib_optim.pt", "model_optim_rng.pt"
STATES = ("param", "exp_avg", "exp_avg_sq")


def folders(path: Path) -> list[Path]:
    """Those of the tensor-parallel ranks; the folder itself, where it is one; none, where it is no such checkpoint."""
    if (path / OPTIMIZER).exists():
        return [path]
    found = sorted(path.glob("mp_rank_*"))
    return found if any((folder / OPTIMIZER).exists() for folder in found) else []


def buckets(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """The dicts with a bucket's (or a parameter's) states in what `distrib_optim.pt` holds, by their place in it."""
    if isinstance(value, dict) and any(isinstance(value.get(key), TensorHeader) for key in STATES):
        yield ".".join(path), value
    elif isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from buckets(inner, (*path, _name(key)))


def weights(value: Any, name: str = "") -> Iterator[tuple[str, TensorHeader]]:
    """The tensors in what a model's nested dict holds, by their names."""
    if isinstance(value, TensorHeader):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from weights(inner, f"{name}.{key}".lstrip("."))


def _name(key: Any) -> str:
    """Keys are numbers, and pairs of types."""
    if isinstance(key, tuple):
        return "(" + ", ".join(getattr(part, "__name__", str(part)) for part in key) + ")"
    return str(key)
