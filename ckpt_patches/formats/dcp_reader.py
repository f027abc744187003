"""Reader for torch.distributed.checkpoint, as training scripts write it: FSDP, HSDP, tensor parallelism, DDP."""

import math
import re
from collections.abc import Iterator, Mapping
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
from ckpt_patches.formats.chunked import Chunked, shards_of
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
    tensors, objects = read_contents(found, index)
    values = {name: own.value for name, own in objects.items()} | {name: _header(own) for name, own in tensors.items()}
    optimizers = dcp.optimizers(index.tensors, index.objects)
    of_optimizers = {name for own in optimizers for state in own.states.values() for name in state.values()}
    others = [name for name in tensors if name not in of_optimizers]
    weights = [tensors[name].tensor for name in others]
    shapes = [own.size for own in weights if own.dtype in FLOATS]  # unlike random states and counts
    counted = [step for own in optimizers for step in _check(found, own, tensors, values)]
    for own in optimizers:
        found.findings += _of_weights(own, tensors, values, shapes)
    set_step(found, counted, path.name)
    for file in sorted(path.iterdir()):  # schedulers, random states, the trainer's own
        if file.name not in found.read and file.is_file() and tensor_streams.is_torchs(file):
            tensor_streams.read(file, found)
    found.findings += trainer_files.findings(path, [own.name for own in path.iterdir()], counted, [])
    found.recorded = next((from_text(values[name]) for name in objects if is_record(name)), None)
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


def _header(chunked: Chunked) -> TensorHeader:
    """A header for a tensor of the index, at the place of its first chunk."""
    size, extent = chunked.tensor.size, next(iter(chunked.extents.values()), None)
    strides = tuple(math.prod(size[axis + 1 :]) for axis in range(len(size)))
    storage = StorageHeader("", chunked.tensor.dtype, math.prod(size), extent.offset if extent else 0)
    return TensorHeader(storage, chunked.tensor.dtype, 0, size, strides)


def _check(found: Checkpoint, own: Optimizer, tensors: Mapping[str, Chunked], values: Mapping[str, Any]) -> list[Any]:
    """Check the consistency of an optimizer's states and param groups. Returns the steps that it states."""
    groups = dcp.groups(own, values)
    found.groups += groups
    keys = {name: int(name) if own.is_numbered else name for name in own.states}
    states = {keys[name]: {key: values[of] for key, of in state.items()} for name, state in own.states.items()}
    steps: dict[Any, Any] = {}
    by_file: dict[str, list[Any]] = {}
    for parameter, name in ((keys[parameter], state.get("step", "")) for parameter, state in own.states.items()):
        extents = list(tensors[name].extents.values()) if name in tensors else []  # an object can be a tensor
        value = values.get(name)
        if isinstance(value, TensorHeader):
            value = tensor_streams.scalar(Path(extents[0].path), value) if extents else None
        if value is not None:
            steps[parameter] = value
            by_file.setdefault(extents[0].path if extents else "", []).append(value)
    where = f"{own.prefix}{dcp.STATE}"
    if groups:
        dimensions = {keys[name]: len(tensors[of].tensor.size) for name, of in own.weights.items()}
        optimizer = torch_optimizers.Optimizer(where, groups, states, steps, dimensions=dimensions)
        found.findings += torch_optimizers.problems(optimizer)
    elif states:
        detail = "no param group, with its settings, is in the checkpoint"
        found.add(damages.UNUSUAL, f"{own.prefix}{dcp.GROUPS}", detail)
    # Parameters that were unused are in several files.
    one_each = {Path(path).name: its[0] for path, its in by_file.items() if path and len(its) >= LEAST_STEPS}
    if len({*one_each.values()}) > 1 and all(len({*its}) == 1 for path, its in by_file.items() if path):
        detail = ", ".join(f"step {step:g} in {name}" for name, step in sorted(one_each.items())[:5])
        found.add(damages.UNUSUAL, where, f"{detail}: are they of one save?")
    if not states and any("betas" in group and group.get("params") for group in groups):
        return [0]  # Adam's states exist after its first step
    return [*steps.values(), *(group["step"] for group in groups if settings.is_step(group.get("step")))]


def _of_weights(
    own: Optimizer, tensors: Mapping[str, Chunked], values: Mapping[str, Any], shapes: list[tuple[int, ...]]
) -> Iterator[Finding]:
    """Check that each state has a weight, of the same shape. `shapes` are those of all weights."""
    where = f"{own.prefix}{dcp.STATE}"
    if own.is_numbered:
        yield Finding(damages.NUMBERED_STATES, where, f"{len(own.states)} parameters")
        states = [{key: values[name] for key, name in state.items()} for state in own.states.values()]
        yield from torch_optimizers.without_weights(where, states, shapes) if shapes else ()
    elif own.several:
        detail = f"tensors of several names could be their weights: {', '.join(map(shown, own.several[:5]))}"
        yield Finding(damages.NOT_JUDGED, where, detail)
    elif without := own.states.keys() - own.weights.keys():
        detail = (
            f"{len(without)} of {len(own.states)} parameters with states have no weight, such as {shown(min(without))}"
        )
        yield Finding(damages.UNUSUAL, where, detail)
    for parameter, weight in own.weights.items():
        size, state = tensors[weight].tensor.size, own.states[parameter]
        for key, name in state.items():
            expected = torch_optimizers.shapes_of(key, size)
            if expected and name in tensors and tensors[name].tensor.size not in expected:
                detail = f"its shape is {shown(tensors[name].tensor.size)}, the weight's {shown(size)}"
                yield Finding(damages.CONTRADICTION, name, detail)


def _roles(own: Optimizer, tensors: Mapping[str, Chunked]) -> Iterator[dict[str, Chunked]]:
    """The arrays of each parameter. An fp32 weight is the main parameter if the optimizer keeps no other."""
    for parameter, state in own.states.items():
        roles = {role: tensors[state[key]] for key, role in ROLES.items() if state.get(key) in tensors}
        weight = tensors.get(own.weights.get(parameter, ""))
        # Adam has one number for each element, and no further means of gradients.
        moments = [roles[role] for role in (EXP_AVG, EXP_AVG_SQ) if role in roles]
        sizes = {array.tensor.size for array in [*moments, *([] if weight is None else [weight])]}
        further = state.keys() - {*ROLES, "max_exp_avg_sq"}
        if moments and (len(sizes) > 1 or any("exp_avg" in key or "." in key for key in further)):
            roles = {role: chunked for role, chunked in roles.items() if role not in (EXP_AVG, EXP_AVG_SQ)}
        if weight is not None:
            is_main = MASTER not in roles and weight.tensor.dtype == "float32"
            roles[MASTER if is_main else WEIGHT] = weight
        yield roles


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


def _note_rest(found: Checkpoint, optimizers: list[Optimizer], others: list[str]) -> None:
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
