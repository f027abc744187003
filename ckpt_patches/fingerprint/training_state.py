"""This rank's state in a training run with plain torch: parameters and optimizer states.

A DTensor's shard is computed from its mesh and placements, not by torch.distributed.checkpoint, the code under test.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ckpt_patches.fingerprint.element_hash import Box, all_of
from ckpt_patches.fingerprint.live_state import Live, Part, dtype_of, in_one_memory, persistent_buffers
from ckpt_patches.fingerprint.proof import rank_in
from ckpt_patches.fingerprint.record import RATE, SETTINGS, STATE, Settings, is_plain, settings_of
from ckpt_patches.fingerprint.states import FROZEN, IN_A_RUN, OF_BUFFER
from ckpt_patches.formats.dcp import MASTERS

EMPTY_GROUP = "param group "  # prefix of the number of a group without parameters, of which settings are recorded
# The attributes in which wrapper modules hold the wrapped one; names in checkpoints omit them.
WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
Indices: TypeAlias = "npt.NDArray[np.int64]"  # along one dimension of the full tensor, in the order of the shard


def live(model: nn.Module, optimizers: Any) -> Live:
    """This rank's part of a model and its optimizers."""
    for module in model.modules():
        if hasattr(module, "set_requires_gradient_sync") and hasattr(module, "reshard"):  # FSDP2
            module.reshard()
    owned = flat_slices(model)
    for name, param in model.named_parameters():
        owned.setdefault(id(param), [(clean_name(model, name), None)])
    tensors: list[tuple[str, str, Any]] = []
    settings: dict[str, Settings] = {}
    left_out: dict[str, str] = {}
    stepped: set[int] = set()
    listed = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    for number, (optimizer, group) in enumerate((one, group) for one in listed for group in one.param_groups):
        if not group["params"]:
            settings[f"{EMPTY_GROUP}{number}"] = _settings(group, {})[0]
        for param in group["params"]:
            states = optimizer.state.get(param, {})
            stepped.add(id(param))
            if id(param) not in owned:
                left_out["a parameter of the optimizer"] = "the model has none that is the same object"
            for name, part in owned.get(id(param), ()):
                if part is None or part.numel:  # else another rank has its elements and step
                    settings[name], its = _settings(group, states)
                    left_out.update({f"{name} {what}": why for what, why in its.items()})
                    tensors += [(name, state, _cut(tensor, part)) for state, tensor in _states(param, states)]
    for param in model.parameters():
        if id(param) not in stepped:
            tensors += [(name, FROZEN, _cut(param.detach(), part)) for name, part in owned[id(param)]]
    tensors += [(clean_name(model, name), OF_BUFFER, buffer) for name, buffer in persistent_buffers(model)]
    parts: list[Part] = []
    memory = []
    for name, state, tensor in tensors:
        if why := _why_not(tensor):
            left_out[f"{name} {state}"] = why
        else:
            parts += _parts(name, state, tensor)
            memory += [((name, state), local(tensor))] if state not in (FROZEN, OF_BUFFER) else []
    return Live(lambda: parts, settings, left_out, in_one_memory(memory))


def clean_name(model: nn.Module, name: str) -> str:
    """The name of a parameter or module, without the parts that wrappers add."""
    found, owner = [], model
    for part in name.split("."):
        is_of_ddp = part == "module" and isinstance(owner, nn.parallel.DistributedDataParallel)
        if not is_of_ddp and part not in WRAPPERS:
            found.append(part)
        owner = getattr(owner, part, owner)
    return ".".join(found)


def _settings(group: Mapping[str, Any], states: Mapping[str, Any]) -> tuple[Settings, dict[str, str]]:
    """A parameter's settings, with the numbers among its states; and what has no fingerprint, and why."""
    found = dict(settings_of({name: _numbers(group[name]) for name in (*SETTINGS, RATE) if name in group}, states))
    numbers = {name: value for name, value in states.items() if name != "step" and not isinstance(value, torch.Tensor)}
    found |= {f"{STATE}{name}": value for name, value in numbers.items() if type(value) in (bool, int, float)}
    left_out = {name: "a setting that is no number" for name, value in found.items() if not is_plain(value)}
    left_out |= {n: f"a state of type {type(v).__name__}" for n, v in numbers.items() if f"{STATE}{n}" not in found}
    return {name: value for name, value in found.items() if name not in left_out}, left_out


def _numbers(value: Any) -> Any:
    """The value of a setting; a learning rate or a pair of betas can be of tensors."""
    if isinstance(value, list | tuple):
        return [_numbers(one) for one in value]
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _states(param: Any, states: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A parameter's own elements and its states, with their names in records; steps are settings."""
    has_main = any(isinstance(states.get(name), torch.Tensor) for name in MASTERS)
    yield ("weight" if has_main else "master"), param.detach()
    for name, value in states.items():
        if isinstance(value, torch.Tensor) and name != "step":
            yield ("master" if name in MASTERS else name), value.detach()


def local(tensor: Any) -> torch.Tensor:
    """This rank's elements of a tensor."""
    if isinstance(tensor, Elements):
        return tensor.values
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "placements") else tensor
    return found


def _why_not(tensor: Any) -> str:
    """Why a tensor has no fingerprint; empty if it has one."""
    if local(tensor).is_meta or local(tensor).layout is not torch.strided:
        return "elements that are not in memory one after another"
    dtype = dtype_of(local(tensor))
    if dtype not in IN_A_RUN:
        return f"elements of {dtype}, expected {', '.join(IN_A_RUN)}"
    if type(local(tensor)) not in (torch.Tensor, nn.Parameter):
        return f"elements in a {type(local(tensor)).__name__}"
    if hasattr(tensor, "placements"):
        if any(placement.is_partial() for placement in tensor.placements):
            return "a sum that ranks have not added up"
        expected = [len(own) for own in _indices(tensor)] if tensor.device_mesh.get_coordinate() else None
        if expected is not None and expected != list(local(tensor).shape):
            return f"a local part of {list(local(tensor).shape)}, where the placements state {expected}"
    return ""


def _indices(tensor: Any) -> list[Indices]:
    mesh = tensor.device_mesh
    return indices(tuple(tensor.shape), tensor.placements, tuple(mesh.shape), mesh.get_coordinate())


def _parts(name: str, state: str, tensor: Any) -> Iterator[Part]:
    """This rank's elements, as boxes of the full tensor."""
    if isinstance(tensor, Elements):
        if len(tensor.values):
            yield Part(name, state, all_of(tensor.shape), tensor.first, tensor.values, tensor.is_main)
        return
    values, shape = local(tensor), tuple(tensor.shape)
    if not values.numel():
        return
    if not hasattr(tensor, "placements"):
        yield Part(name, state, all_of(shape), 0, values)
    elif tensor.device_mesh.get_coordinate() is not None:
        at = tensor.device_mesh.get_coordinate()
        main = not any(index for index, own in zip(at, tensor.placements, strict=True) if own.is_replicate())
        for own, offsets in runs(_indices(tensor)):
            piece = values[own]
            yield Part(name, state, Box(offsets, tuple(piece.shape), shape), 0, piece, main)


# Shards of DTensors: https://docs.pytorch.org/docs/stable/distributed.tensor.html


def indices(
    shape: Sequence[int], placements: Sequence[Any], mesh: Sequence[int], coordinate: Sequence[int]
) -> list[Indices]:
    """The indices of the shard at a coordinate of the mesh, by dimension.

    Args:
        shape: of the full tensor.
        placements: one per mesh dimension: a `Shard` divides as torch.chunk does, a strided one (FSDP with tensor
            parallelism) divides each of `split_factor` chunks; any other does not divide.
        mesh: its shape.
        coordinate: the rank's coordinate in the mesh.
    """
    found = [np.arange(size) for size in shape]
    for placement, count, at in zip(placements, mesh, coordinate, strict=True):
        dimension = getattr(placement, "dim", None)
        if dimension is not None:
            factor = getattr(placement, "split_factor", 1)
            chunks = [_chunk(found[dimension], factor, number) for number in range(factor)]
            found[dimension] = np.concatenate([_chunk(chunk, count, at) for chunk in chunks])
    return found


def _chunk(values: Indices, count: int, at: int) -> Indices:
    """One of `count` chunks, as in torch.chunk: all are equally long except at the end."""
    size = -(-len(values) // count)
    return values[at * size : (at + 1) * size]


def runs(found: Sequence[Indices]) -> Iterator[tuple[tuple[slice, ...], tuple[int, ...]]]:
    """The boxes of a shard: the slices of each box in the shard, and its first element in the full tensor."""
    ends = [[0, *np.flatnonzero(np.diff(own) != 1) + 1, len(own)] for own in found]
    for box in itertools.product(*(itertools.pairwise(own) for own in ends)):
        if all(begin < end for begin, end in box):
            yield (
                tuple(slice(*own) for own in box),
                tuple(int(own[at]) for own, (at, _) in zip(found, box, strict=True)),
            )


# FSDP1: parameters that are flattened together; each rank has a range of the elements. Torch's metadata:
# `FlatParameter` in torch/distributed/fsdp/_flat_param.py


class Elements(NamedTuple):
    """Contiguous elements of a flattened parameter."""

    values: torch.Tensor  # one dimension
    shape: tuple[int, ...]  # of the full parameter
    first: int  # index of the first element in it
    is_main: bool  # whether the shard is the first of its replicas


class Slice(NamedTuple):
    """A parameter's elements in a rank's shard of a flat parameter."""

    shape: tuple[int, ...]  # of the full parameter
    first: int  # index of the first element in the parameter
    at: int  # the same in the shard
    numel: int
    is_own: bool  # whether the optimizer has the parameter itself, not the flat parameter
    is_main: bool


def _cut(tensor: torch.Tensor, part: Slice | None) -> Elements | torch.Tensor:
    """A parameter's elements in one of the optimizer's tensors; a scalar is returned unchanged."""
    if part is None or tensor.dim() == 0:
        return tensor
    flat = tensor.reshape(-1)
    own = flat if part.is_own else flat[part.at : part.at + part.numel]
    return Elements(own, part.shape, part.first, part.is_main)


def flat_slices(model: nn.Module) -> dict[int, list[tuple[str, Slice | None]]]:
    """The names and slices of flattened parameters, by the identity of the optimizer's or model's tensor."""
    found: dict[int, list[tuple[str, Slice | None]]] = {}
    for prefix, module in model.named_modules():
        flat = getattr(getattr(module, "_handle", None), "flat_param", None)
        if flat is None:
            continue
        replicas = getattr(module, "_inter_node_pg", None)  # of a hybrid sharding
        is_main = replicas is None or rank_in(replicas) == 0
        for number, (name, shape) in enumerate(zip(flat._fqns, flat._shapes, strict=True)):
            full = clean_name(model, ".".join(filter(None, (prefix, name))))
            info, originals = flat._shard_param_infos[number], flat._params
            first, at, numel = (
                (info.intra_param_start_idx, info.offset_in_shard, info.numel_in_shard) if info.in_shard else (0, 0, 0)
            )
            own = Slice(tuple(shape), first, at, numel, is_own=originals is not None, is_main=is_main)
            key = flat if originals is None else originals[number]
            found.setdefault(id(key), []).append((full, own))
    return found
