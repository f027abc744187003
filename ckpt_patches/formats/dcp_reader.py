"""Reader for torch.distributed.checkpoint, as training scripts write it: FSDP, HSDP, tensor parallelism, DDP."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_patches.formats import damages, dcp, settings, tensor_streams, torch_dist, torch_optimizers, trainer_files
from ckpt_patches.formats.checkpoint import (
    ALONE,
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    WEIGHT,
    Checkpoint,
    first_beta,
    last_step,
)
from ckpt_patches.formats.chunked import TOO_MANY, Chunked, shards_of
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.dcp import MASTERS, Optimizer
from ckpt_patches.formats.dtypes import FLOATS
from ckpt_patches.formats.recorded import from_text, is_record
from ckpt_patches.formats.torch_dist_reader import read_contents, read_index
from ckpt_patches.formats.torch_file import StorageHeader, TensorHeader
from ckpt_patches.runtime.shown import shown

FORMAT, WEIGHTS_ALONE = "torch.distributed.checkpoint", f"torch.distributed.checkpoint{ALONE}"
LEAST_STEPS = 3  # of parameters, in one file: those of fewer can be equal by chance
ROLES = {**dict.fromkeys(MASTERS, MASTER), "exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ}
NUMBER = re.compile(r"(?:global_)?(?:step|iter|checkpoint)[-_]?(\d{1,15})")  # in a checkpoint folder's name


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint, with findings for the problems of its files."""
    found = Checkpoint(path, FORMAT)
    index = _index(found)
    tensors, read = read_contents(found, index)
    found.findings += _untiled(tensors.values())
    objects = {name: own.value for name, own in read.items()}
    values = {**objects, **{name: _header(chunked) for name, chunked in tensors.items()}}
    optimizers = dcp.optimizers(index.tensors, index.objects)
    steps = {state["step"] for own in optimizers for state in own.states.values() if "step" in state}
    of_optimizers = {name for own in optimizers for state in own.states.values() for name in state.values()}
    others = [name for name in tensors if name not in of_optimizers]
    contents = _Contents(tensors, values, _steps(tensors, values, steps), others)
    counted = [step for own in optimizers for step in _check(found, own, contents)]
    set_step(found, counted, path.name)
    read_others(found)
    found.findings += trainer_files.findings(path, [own.name for own in path.iterdir()], counted, [])
    found.recorded = next((from_text(v) for name, v in objects.items() if is_record(name)), None)
    parameters = [roles for own in optimizers for roles in _roles(own, tensors)]
    taken = {chunked.tensor.name for roles in parameters for chunked in roles.values()}
    parameters += [{WEIGHT: chunked} for name, chunked in tensors.items() if name not in taken]
    for roles in filter(None, parameters):
        named = next(roles[role] for role in (WEIGHT, MASTER, *roles) if role in roles)
        found.shards += shards_of(found, named.tensor.name, roles)
    _note_rest(found, optimizers, others)
    return found


def _index(found: Checkpoint) -> torch_dist.Index:
    """All indexes merged, with folder names in the file paths. Adds a finding for each index that cannot be read."""
    indexes: list[tuple[Path, torch_dist.Index]] = []
    for folder in dcp.folders(found.path):
        if (folder / torch_dist.INDEX).exists():
            indexes.append((folder, read_index(found, folder)))
        else:
            where = (folder / torch_dist.INDEX).relative_to(found.path)
            found.add(damages.INCOMPLETE_SAVE, folder.name, f"{where}, which is written last, is not there")
    return dcp.merged(found.path, indexes)


def _untiled(arrays: Iterable[Chunked]) -> Iterator[Finding]:
    for array in arrays:
        if why := array.untiled():
            yield Finding(damages.NOT_JUDGED if why == TOO_MANY else damages.FRAGMENTS, array.tensor.name, why)


def _header(chunked: Chunked) -> TensorHeader:
    """A header for a tensor of the index, at the place of its first chunk."""
    tensor, extents = chunked.tensor, list(chunked.extents.values())
    stride, strides = 1, []
    for size in reversed(tensor.size):
        strides.append(stride)
        stride *= size
    storage = StorageHeader("", tensor.dtype, stride, extents[0].offset if extents else 0)
    return TensorHeader(storage, tensor.dtype, 0, tensor.size, tuple(reversed(strides)))


@dataclass(frozen=True)
class _Contents:
    """Everything that the indexes list."""

    tensors: Mapping[str, Chunked]
    values: Mapping[str, Any]  # values of objects, headers of tensors
    steps: Mapping[str, Any]  # by the tensor's or object's name; numbers if readable
    others: Sequence[str]  # names of tensors that are no optimizer's


def _steps(tensors: Mapping[str, Chunked], values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The values of objects and of tensors with one element, by name. Unreadable ones are left out."""
    read: dict[str, Any] = {}
    for name in names:
        value = values[name]
        if isinstance(value, TensorHeader):
            extents = list(tensors[name].extents.values()) if name in tensors else []  # an object can be a tensor
            value = tensor_streams.scalar(Path(extents[0].path), value) if extents else None
        if value is not None:
            read[name] = value
    return read


def _check(found: Checkpoint, own: Optimizer, contents: _Contents) -> list[Any]:
    """Check the consistency of an optimizer's states, param groups and weights. Returns the steps that it states."""
    groups = dcp.groups(own, contents.values)
    found.groups += groups
    keys = {name: int(name) if own.is_numbered else name for name in own.states}
    states = {keys[name]: {key: contents.values[of] for key, of in state.items()} for name, state in own.states.items()}
    steps = {
        keys[name]: contents.steps[state["step"]]
        for name, state in own.states.items()
        if state.get("step") in contents.steps
    }
    where = f"{own.prefix}{dcp.STATE}".rstrip(".")
    if groups:
        sizes = {keys[name]: contents.tensors[of].tensor.size for name, of in own.weights.items()}
        dimensions = {key: len(size) for key, size in sizes.items()}
        optimizer = torch_optimizers.Optimizer(where, groups, states, steps, dimensions=dimensions)
        found.findings += torch_optimizers.problems(optimizer)
    elif states:
        detail = "no param group, with its settings, is in the checkpoint"
        found.add(damages.UNUSUAL, f"{own.prefix}{dcp.GROUPS}", detail)
    found.findings += _of_weights(own, contents)
    found.findings += _steps_by_file(own, contents)
    if not states and any("betas" in group and group.get("params") for group in groups):
        return [0]  # Adam's states exist after its first step
    return [*steps.values(), *(group["step"] for group in groups if settings.is_step(group.get("step")))]


def _steps_by_file(own: Optimizer, contents: _Contents) -> Iterator[Finding]:
    """Check that no file has other steps than the others have: parameters that were unused are in several files."""
    by_file: dict[str, list[Any]] = {}
    for name in (state["step"] for state in own.states.values() if "step" in state):
        if name in contents.tensors and name in contents.steps and (extents := contents.tensors[name].extents):
            by_file.setdefault(next(iter(extents.values())).path, []).append(contents.steps[name])
    one_each = {Path(path).name: steps[0] for path, steps in by_file.items() if len(steps) >= LEAST_STEPS}
    if len({*one_each.values()}) > 1 and all(len({*steps}) == 1 for steps in by_file.values()):
        detail = ", ".join(f"step {step:g} in {name}" for name, step in sorted(one_each.items())[:5])
        yield Finding(damages.UNUSUAL, f"{own.prefix}{dcp.STATE}".rstrip("."), f"{detail}: are they of one save?")


def _of_weights(own: Optimizer, contents: _Contents) -> Iterator[Finding]:
    """Check that each state has a weight, of the same shape."""
    where = f"{own.prefix}{dcp.STATE}".rstrip(".")
    if own.is_numbered:
        yield Finding(damages.NUMBERED_STATES, where, f"{len(own.states)} parameters")
        states = [{key: contents.values[name] for key, name in state.items()} for state in own.states.values()]
        others = [contents.tensors[name].tensor for name in contents.others]
        shapes = [tensor.size for tensor in others if tensor.dtype in FLOATS]  # unlike random states and counts
        yield from torch_optimizers.without_weights(where, states, shapes) if shapes else ()
    elif own.several:
        detail = f"tensors of several names could be their weights: {', '.join(map(shown, own.several[:5]))}"
        yield Finding(damages.NOT_JUDGED, where, detail)
    elif own.states and not own.weights:
        yield Finding(damages.UNUSUAL, where, f"states of {len(own.states)} parameters, and no weight of any of them")
    for parameter, state in own.states.items() if own.weights else ():
        if parameter not in own.weights:
            yield Finding(damages.UNUSUAL, parameter, "it has states of an optimizer, and the model has no such weight")
            continue
        size = contents.tensors[own.weights[parameter]].tensor.size
        for key, name in state.items():
            there = contents.tensors.get(name)
            expected = torch_optimizers.shapes_of(key, size)
            if expected and there is not None and there.tensor.size not in expected:
                detail = f"its shape is {shown(there.tensor.size)}, the weight's {shown(size)}"
                yield Finding(damages.CONTRADICTION, name, detail)


def _roles(own: Optimizer, tensors: Mapping[str, Chunked]) -> Iterator[dict[str, Chunked]]:
    """The arrays of each parameter. An fp32 weight is the main parameter if the optimizer keeps no other."""
    for parameter, state in own.states.items():
        roles = {role: tensors[state[key]] for key, role in ROLES.items() if state.get(key) in tensors}
        weight = tensors.get(own.weights.get(parameter, ""))
        if {*roles} & {EXP_AVG, EXP_AVG_SQ} and not _are_of_adam(state, roles, weight):
            roles = {role: chunked for role, chunked in roles.items() if role not in (EXP_AVG, EXP_AVG_SQ)}
        if weight is not None:
            is_main = MASTER not in roles and weight.tensor.dtype == "float32"
            roles[MASTER if is_main else WEIGHT] = weight
        yield roles


def _are_of_adam(state: Mapping[str, str], roles: Mapping[str, Chunked], weight: Chunked | None) -> bool:
    """Whether the moments are those of Adam: one number for each element, and no further means of gradients."""
    sizes = {roles[role].tensor.size for role in (EXP_AVG, EXP_AVG_SQ) if role in roles}
    sizes |= {weight.tensor.size} if weight is not None else set()
    further = state.keys() - {*ROLES, "max_exp_avg_sq"}
    return len(sizes) == 1 and not any("exp_avg" in key or "." in key for key in further)


def set_step(found: Checkpoint, steps: list[Any], *folders: str) -> None:
    """Set the optimizer's step and beta1. Adds a finding if a folder's name states far more steps.

    Step 1 counts as unknown: `get_state_dict` takes a step without gradients to create missing states.
    """
    found.beta1 = first_beta(found.groups)
    step, named = last_step(steps), next(filter(None, map(NUMBER.fullmatch, folders)), None)
    found.step = None if step == 1 else step
    count = int(named[1]) if named else 0
    if named and step is not None and step + trainer_files.skipped(count) < count:
        detail = f"the optimizer has taken {step} steps, and the folder is named {named[0]}: were the states loaded?"
        found.add(damages.UNUSUAL, "optimizer", detail)


def read_others(found: Checkpoint) -> None:
    """Read the remaining torch.save files: schedulers, random states, the trainer's own."""
    for file in sorted(found.path.iterdir()):
        if file.name not in found.read and file.is_file() and tensor_streams.is_torchs(file):
            tensor_streams.read(file, found)


def _note_rest(found: Checkpoint, optimizers: list[Optimizer], others: Iterable[str]) -> None:
    """Note the model's tensors without optimizer states: frozen ones, buffers, or all if there is no optimizer."""
    with_states = {name for own in optimizers for name in own.weights.values()}
    prefixes = {name.removesuffix(parameter) for own in optimizers for parameter, name in own.weights.items()}
    found.neither |= {name for name in others if prefixes and not any(map(name.startswith, prefixes))}
    rest = [name for name in others if name not in with_states]
    found.buffers |= set(rest) if with_states else set()
    if not any(own.states for own in optimizers):
        found.format = WEIGHTS_ALONE
    if rest and not any(own.is_numbered or own.several for own in optimizers):
        found.add(damages.NO_OPTIMIZER_STATE, f"{len(rest)} tensors")
