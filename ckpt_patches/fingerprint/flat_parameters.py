"""FSDP1: parameters that are flattened together; each rank has a range of the elements.

Torch's metadata: `FlatParameter` in torch/distributed/fsdp/_flat_param.py.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn


class Elements(NamedTuple):
    """Contiguous elements of a flattened parameter."""

    values: torch.Tensor  # one dimension
    shape: tuple[int, ...]  # of the full parameter
    first: int  # index of the first element in it


class Slice(NamedTuple):
    """A parameter's elements in a rank's shard of a flat parameter."""

    shape: tuple[int, ...]  # of the full parameter
    first: int  # index of the first element in the parameter
    at: int  # the same in the shard
    numel: int
    is_own: bool  # whether the optimizer has the parameter itself, not the flat parameter

    def of(self, tensor: torch.Tensor) -> Elements | torch.Tensor:
        """A parameter's elements in one of the optimizer's tensors; a scalar is returned unchanged."""
        if tensor.dim() == 0:
            return tensor
        flat = tensor.reshape(-1)
        return Elements(flat if self.is_own else flat[self.at : self.at + self.numel], self.shape, self.first)


def slices(model: nn.Module, clean_name: Callable[[nn.Module, str], str]) -> dict[int, list[tuple[str, Slice]]]:
    """The names and slices of flattened parameters, by the identity of the optimizer's or model's tensor."""
    found: dict[int, list[tuple[str, Slice]]] = {}
    for prefix, module in model.named_modules():
        flat = getattr(getattr(module, "_handle", None), "flat_param", None)
        if flat is None:
            continue
        for number, (name, shape) in enumerate(zip(flat._fqns, flat._shapes, strict=True)):
            full = clean_name(model, ".".join(filter(None, (prefix, name))))
            info, originals = flat._shard_param_infos[number], flat._params
            first, at, numel = (
                (info.intra_param_start_idx, info.offset_in_shard, info.numel_in_shard) if info.in_shard else (0, 0, 0)
            )
            own = Slice(tuple(shape), first, at, numel, is_own=originals is not None)
            key = flat if originals is None else originals[number]
            found.setdefault(id(key), []).append((full, own))
    return found
