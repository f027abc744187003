"""This rank's state in a training run with plain torch: parameters and optimizer states.

A DTensor's shard is computed from its mesh and placements, not by torch.distributed.checkpoint, the code under test.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ckpt_patches.fingerprint import deepspeed_others, flat_parameters
from ckpt_patches.fingerprint.boxes import Box
from ckpt_patches.fingerprint.live_state import Live, Part, in_one_memory
from ckpt_patches.fingerprint.record import RATE, SETTINGS, STATE, Settings, is_plain, settings_of
from ckpt_patches.fingerprint.shards import Indices, indices, runs
from ckpt_patches.fingerprint.states import FROZEN, OF_BUFFER
from ckpt_patches.fingerprint.verdict import BUFFER
from ckpt_patches.formats.dcp import MASTERS
from ckpt_patches.formats.dtypes import FLOATS

EMPTY_GROUP = "param group "  # prefix of the number of a group without parameters, of which settings are recorded
# The attributes in which wrapper modules hold the wrapped one; names in checkpoints omit them.
WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def live(model: nn.Module, optimizers: Any) -> Live:
    """This rank's part of a model and its optimizers."""
    for module in model.modules():
        if hasattr(module, "set_requires_gradient_sync") and hasattr(module, "reshard"):  # FSDP2
            module.reshard()
    names = parameter_names(model)
    flats = flat_parameters.slices(model, clean_name)
    tensors: list[tuple[str, str, Any]] = []
    settings: dict[str, Settings] = {}
    left_out: dict[str, str] = {}
    stepped: set[int] = set()
    for param, group, states in _stepped(optimizers):
        stepped.add(id(param))
        owned: list[tuple[str, flat_parameters.Slice | None]] = [*flats.get(id(param), ())]
        owned = owned or ([(names[id(param)], None)] if id(param) in names else [])
        if not owned:
            left_out["a parameter of the optimizer"] = "the model has none that is the same object"
        for name, part in owned:
            if part is not None and not part.numel:  # another rank has its elements and step
                continue
            settings[name], its = _settings(group, states)
            left_out.update({f"{name} {what}": why for what, why in its.items()})
            tensors += [(name, state, part.of(tensor) if part else tensor) for state, tensor in _states(param, states)]
    for number, group in enumerate(_groups(optimizers)):
        if not group["params"]:
            settings[f"{EMPTY_GROUP}{number}"] = _settings(group, {})[0]
    frozen = [(name, FROZEN, param) for name, param in _frozen(model, names, flats, stepped)]
    buffers = [(clean_name(model, name), OF_BUFFER, buffer) for name, buffer in deepspeed_others.buffers(model)]
    others = {f"{BUFFER}{name}": buffer for name, _, buffer in buffers if not buffer.is_floating_point()}
    known = []
    for name, state, tensor in (*tensors, *frozen, *(one for one in buffers if f"{BUFFER}{one[0]}" not in others)):
        if why := _why_not(tensor):
            left_out[f"{name} {state}"] = why
        else:
            known.append((name, state, tensor))

    def parts() -> Iterator[Part]:
        for name, state, tensor in known:
            yield from _parts(name, state, tensor)

    memory = [((name, state), local(tensor)) for name, state, tensor in known if state not in (FROZEN, OF_BUFFER)]
    return Live(parts, settings, left_out, in_one_memory(memory), others=_digests(others, left_out))


def _digests(buffers: Mapping[str, Any], left_out: dict[str, str]) -> dict[str, Settings]:
    """The digests of buffers that are no floats; adds to `left_out` why some cannot be read."""
    found: dict[str, Settings] = {}
    for what, buffer in buffers.items():
        try:
            found[what] = {"value": deepspeed_others.digest(local(buffer))}
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            left_out[what] = f"its elements cannot be read: {type(error).__name__}"
    return found


def parameter_names(model: nn.Module) -> dict[int, str]:
    """The names of the parameters in checkpoints, by the parameters' identity."""
    return {id(param): clean_name(model, name) for name, param in model.named_parameters()}


def clean_name(model: nn.Module, name: str) -> str:
    """The name of a parameter or module, without the parts that wrappers add."""
    found, owner = [], model
    for part in name.split("."):
        is_of_ddp = part == "module" and isinstance(owner, nn.parallel.DistributedDataParallel)
        if not is_of_ddp and part not in WRAPPERS:
            found.append(part)
        owner = getattr(owner, part, owner)
    return ".".join(found)


def _stepped(optimizers: Any) -> Iterator[tuple[Any, Mapping[str, Any], Mapping[str, Any]]]:
    """Each parameter that an optimizer steps, with its param group and states."""
    for optimizer in _listed(optimizers):
        for group in optimizer.param_groups:
            for param in group["params"]:
                yield param, group, optimizer.state.get(param, {})


def _groups(optimizers: Any) -> Iterator[Mapping[str, Any]]:
    return (group for optimizer in _listed(optimizers) for group in optimizer.param_groups)


def _listed(optimizers: Any) -> list[Any]:
    return list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]


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


def _frozen(
    model: nn.Module, names: Mapping[int, str], flats: Mapping[int, Any], stepped: set[int]
) -> Iterator[tuple[str, Any]]:
    for param in model.parameters():
        if id(param) not in stepped:
            if id(param) in flats:
                yield from ((name, part.of(param.detach())) for name, part in flats[id(param)])
            else:
                yield names[id(param)], param.detach()


def local(tensor: Any) -> torch.Tensor:
    """This rank's elements of a tensor."""
    if isinstance(tensor, flat_parameters.Elements):
        return tensor.values
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "placements") else tensor
    return found


def _why_not(tensor: Any) -> str:
    """Why a tensor has no fingerprint; empty if it has one."""
    if local(tensor).is_meta or local(tensor).layout is not torch.strided:
        return "elements that are not in memory one after another"
    dtype = str(local(tensor).dtype).removeprefix("torch.")
    if dtype not in FLOATS:
        return f"elements of {dtype}, expected {', '.join(FLOATS)}"
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
    if isinstance(tensor, flat_parameters.Elements):
        box = Box((0,) * len(tensor.shape), tensor.shape, tensor.shape)
        yield from [Part(name, state, box, tensor.first, tensor.values, True)] if len(tensor.values) else []
        return
    values, shape = local(tensor), tuple(tensor.shape)
    if not values.numel():
        return
    if not hasattr(tensor, "placements"):
        yield Part(name, state, Box((0,) * len(shape), shape, shape), 0, values.reshape(-1), True)
    elif tensor.device_mesh.get_coordinate() is not None:
        at = tensor.device_mesh.get_coordinate()
        main = not any(index for index, own in zip(at, tensor.placements, strict=True) if own.is_replicate())
        for own, offsets in runs(_indices(tensor)):
            piece = values[own]
            yield Part(name, state, Box(offsets, tuple(piece.shape), shape), 0, piece.reshape(-1), main)
