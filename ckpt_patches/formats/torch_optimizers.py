"""Read torch optimizers, wherever a torch.save file has them: `state` and `param_groups`, and check these.

https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.state_dict.html
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_patches.formats import damages, settings, tensor_streams
from ckpt_patches.formats.checkpoint import EXP_AVG, EXP_AVG_SQ, MASTER, MOMENTS, Checkpoint, Shard
from ckpt_patches.formats.damages import CONTRADICTION, FOREIGN_FILE, MISSING_STATE, RARE, UNUSUAL, Finding
from ckpt_patches.formats.torch_file import Instance, TensorHeader, TorchFile
from ckpt_patches.runtime.shown import shown

KEYS = {"state", "param_groups"}
NO_STATES = "expected state and param_groups, as a torch optimizer's state dict has them"
MASTERS = ("fp32_groups_flat", "fp32_groups")  # of DeepSpeed's FP16_Optimizer and FP16_UnfusedOptimizer
DEEPEST = 8  # dicts and objects around an optimizer
# Settings that all groups of one optimizer have. Users can add others to some groups.
SHARED = {
    *("betas", "eps", "weight_decay", "amsgrad", "bias_correction", "decoupled_weight_decay"),
    *("momentum", "maximize", "foreach", "capturable", "differentiable", "fused"),
}
# States with as many elements as the parameter, unlike Adafactor's rows and columns and Shampoo's factors.
OF_ELEMENTS = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg", "master_param"),
    *("grad_avg", "acc_delta", "prev", "ax"),  # of RMSprop, Adadelta, Rprop, ASGD
)
WITH_STATES = "parameters with states"
OF_A_DIMENSION = re.compile(r"\w*[^\W\d]_(\d{1,3})")  # names of Shampoo's and SM3's states, such as pre_cond_0
OF_MATRICES = ("row_var", "col_var", "_row", "_col")  # suffixes of Adafactor's names, in torch and Transformers


def shapes_of(state: str, weight: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes that a state of a weight can have; empty if the state is not known."""
    if state in ("step_size", "variance", "exp_avg_sq"):  # Amos and others have one number
        return [weight, ()]
    if state in OF_ELEMENTS:
        return [weight]
    before, rows, columns = weight[:-2], weight[:-1], weight[-1:]
    of_adafactor = {
        "row_var": (*rows, 1),  # in torch
        "col_var": (*before, 1, *columns),
        "exp_avg_sq_row": rows,  # in Transformers
        "exp_avg_sq_col": (*before, *columns),
    }
    return [of_adafactor[state]] if state in of_adafactor else []


@dataclass(frozen=True)
class Optimizer:
    """An optimizer in a file."""

    where: str  # the file's name
    groups: Sequence[Mapping[str, Any]]  # param groups
    states: Mapping[Any, Mapping[str, Any]]  # by parameter number; tensors are headers
    steps: Mapping[Any, Any]  # by parameter number, if it has a step; a number if it could be read
    masters: Sequence[Any] = ()  # main parameters, in parameter order; empty if the file has none
    weights: Sequence[Any] = ()  # the model's, in any order
    checksums: Mapping[int, int] = field(default_factory=dict)  # CRC-32 by offset, for tensors that are not all zeros
    taken: int | None = None  # steps that the trainer counted; None if unknown
    dimensions: Mapping[Any, int] = field(default_factory=dict)  # of the weights, by parameter number, where known

    @property
    def parameters(self) -> list[tuple[int, Any]]:
        """Group number and parameter number of each parameter."""
        groups = [(n, group.get("params")) for n, group in enumerate(self.groups)]
        return [(n, param) for n, params in groups if isinstance(params, (list, tuple)) for param in params]


def problems(optimizer: Optimizer) -> Iterator[Finding]:
    """Yield all problems of an optimizer. Pure."""
    groups, where = optimizer.groups, optimizer.where
    steps = {f"step of parameter {shown(number)}": step for number, step in optimizer.steps.items()}
    for what in (*settings.not_groups(groups), *settings.not_numbers(groups), *settings.not_steps(steps)):
        yield Finding(CONTRADICTION, where, what)
    # In a mix, such as Muon with Adam, each kind has its own settings.
    for what in settings.unlike_groups([{k: v for k, v in group.items() if k in SHARED} for group in groups]):
        yield Finding(UNUSUAL, where, what)
    yield from _states(optimizer)
    if optimizer.masters:
        yield from _masters(optimizer)
    yield from _steps(optimizer)


def _states(optimizer: Optimizer) -> Iterator[Finding]:
    """Check that each parameter has the states that others of its kind have, all of the same shape.

    Its kind: the groups of the same optimizer and the same number of dimensions. Adafactor, Shampoo and others have
    different states for matrices and vectors.
    """
    groups, where = optimizer.groups, optimizer.where
    parameters = [(group, number) for group, number in optimizer.parameters if isinstance(number, (int, str))]
    held = {n: {str(name) for name in own if own[name] is not None} for n, own in optimizer.states.items() if own}
    kinds = {n: (_flags(groups[group]), _dimensions(optimizer, n)) for group, n in parameters if n in held}
    named: dict[Any, set[str]] = {}
    for number, kind in kinds.items():
        named.setdefault(kind, set()).update(held[number])
    has_betas = any("betas" in group for group in groups)
    for index, group in enumerate(groups):
        # Transformers' Adafactor has its own settings.
        is_of_adam = "betas" not in group and (has_betas or {*group} >= settings.TORCHS_ADAM - {"betas"})
        if is_of_adam and {*MOMENTS} <= {name for of, n in parameters if of == index for name in held.get(n, ())}:
            yield Finding(CONTRADICTION, where, f"group {index} has no betas, and moments of Adam")
    for index, number in parameters:
        if number in kinds:
            # What is nested is the optimizer's own, and a matrix has more factors than a vector.
            names = {name for name in named[kinds[number]] if "." not in name and not OF_A_DIMENSION.fullmatch(name)}
            yield from _of_parameter(optimizer, number, (names | _by_settings(groups[index])) - held[number])
    without = [number for _, number in parameters if number not in kinds]
    if without and kinds:
        yield Finding(
            RARE, where, f"{len(without)} parameters, frozen or unused, have no state: {shown(without[0])}, …"
        )
    for number in sorted(optimizer.states.keys() - {number for _, number in parameters}, key=str)[:5]:
        yield Finding(CONTRADICTION, where, f"a state of {shown(number)}, which no param group names")


def _of_parameter(optimizer: Optimizer, number: Any, absent: set[str]) -> Iterator[Finding]:
    """Check the states of a parameter that has some."""
    where, state = optimizer.where, optimizer.states[number]
    for name in sorted(absent):
        yield Finding(MISSING_STATE, where, f"parameter {shown(number)} has no {shown(name)}")
    tensors = {str(name): value for name, value in state.items() if isinstance(value, TensorHeader) and value.shape}
    if len({tensor.shape for name, tensor in tensors.items() if name in OF_ELEMENTS}) > 1:
        yield Finding(CONTRADICTION, where, f"states of parameter {shown(number)} have different shapes")
    unlike = [own for name, own in tensors.items() if not name.startswith("max_") and own.numel > 1]  # AMSGrad's
    crcs = [crc for tensor in unlike if (crc := optimizer.checksums.get(tensor.offset))]
    if len(set(crcs)) < len(crcs):
        yield Finding(FOREIGN_FILE, where, f"two states of parameter {shown(number)} are the same, bit for bit")


def _dimensions(optimizer: Optimizer, number: Any) -> int | None:
    """The dimensions of a parameter, by its weight or else its states; None if it has none but its step."""
    if number in optimizer.dimensions:
        return optimizer.dimensions[number]
    state = optimizer.states[number]
    if any(str(name).endswith(OF_MATRICES) for name in state):
        return 2
    if numbers := [int(own[1]) for own in map(OF_A_DIMENSION.fullmatch, map(str, state)) if own]:
        return max(numbers) + 1
    tensors = [value for name, value in state.items() if isinstance(value, TensorHeader) and name != "step"]
    return max((len(tensor.shape) for tensor in tensors), default=None)


def _flags(group: Mapping[str, Any]) -> frozenset[Any]:
    """A group's settings but for numbers, which all groups of one optimizer have. Muon's can have a flag."""
    return frozenset((key, value if isinstance(value, (bool, str)) else None) for key, value in group.items())


def _by_settings(group: Mapping[str, Any]) -> set[str]:
    """The states that the settings of torch's Adam promise."""
    if not group.keys() >= settings.TORCHS_ADAM:
        return set()
    return {*MOMENTS, *(("step",) if "step" not in group else ())}


def _masters(optimizer: Optimizer) -> Iterator[Finding]:
    """Check that each parameter has a main parameter of its states' shape, and the model a weight for each."""
    where, masters, parameters = optimizer.where, optimizer.masters, optimizer.parameters
    if len(masters) != len(parameters):
        yield Finding(MISSING_STATE, where, f"{len(masters)} main parameters of {len(parameters)} parameters")
        return
    for (_, number), master in zip(parameters, masters, strict=True):
        state = optimizer.states.get(number, {}) if isinstance(number, (int, str)) else {}
        shapes = {value.shape for value in state.values() if isinstance(value, TensorHeader) and value.shape}
        if isinstance(master, TensorHeader) and shapes and master.shape not in shapes:
            yield Finding(CONTRADICTION, where, f"the main parameter {shown(number)} has another shape than its states")
    own, weights = ([one.shape for one in of if isinstance(one, TensorHeader)] for of in (masters, optimizer.weights))
    is_flat = any(len(shape) > 1 for shape in weights) and not any(len(shape) > 1 for shape in own)
    if weights and not is_flat:
        yield from unmatched(damages.MISSING_WEIGHT, where, "main parameters", own, weights)


def without_weights(
    where: str, states: Iterable[Mapping[Any, Any]], weights: Iterable[tuple[int, ...]]
) -> Iterator[Finding]:
    """Yield the shapes with fewer weights than states, where no file states which state belongs to which weight.

    A rank's own part of a flat parameter has such a shape: the parts of the other ranks were not saved.
    """
    return unmatched(UNUSUAL, where, WITH_STATES, [own.shape for own in first_states(states)], weights)


def first_states(states: Iterable[Mapping[Any, Any]]) -> Iterator[TensorHeader]:
    """The first state of each parameter that has a number for each of its elements."""
    for state in states:
        own = [one for key in OF_ELEMENTS if isinstance(one := state.get(key), TensorHeader)]
        yield from [one for one in own[:1] if one.shape]  # Amos has one number


def unmatched(
    kind: damages.FindingKind,
    where: str,
    what: str,
    shapes: Iterable[tuple[int, ...]],
    weights: Iterable[tuple[int, ...]],
) -> Iterator[Finding]:
    """Yield the shapes that fewer weights than others have."""
    for shape, count in (Counter(shapes) - Counter(weights)).items():
        yield Finding(kind, where, f"{count} {what} of the shape {shown(tuple(shape))} have no weight in the model")


def _steps(optimizer: Optimizer) -> Iterator[Finding]:
    """Check that all parameters are at one step, and that the trainer's step agrees."""
    steps = sorted({step for step in optimizer.steps.values() if settings.is_step(step)})
    if len(steps) > 1:
        found = ", ".join(f"{step:g}" for step in steps[:5])
        yield Finding(RARE, optimizer.where, f"parameters are at different steps: {found}")
    # DeepSpeed can take one more step at the start, with zero gradients, to allocate the states.
    elif steps and optimizer.taken is not None and int(steps[0]) not in (optimizer.taken, optimizer.taken + 1):
        what = f"the engine has counted {optimizer.taken} steps, the optimizer {steps[0]:g}"
        yield Finding(UNUSUAL, optimizer.where, what)


def within(value: Any, depth: int = 0) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """The optimizers in dicts and objects at any depth, each with the main parameters that are stored next to it."""
    value = value.fields if isinstance(value, Instance) else value
    if not isinstance(value, dict) or depth > DEEPEST:
        return
    if isinstance(value.get("state"), dict) and isinstance(value.get("param_groups"), list):
        yield value, []
        return
    held: list[Any] = next((value[key] for key in MASTERS if isinstance(value.get(key), list)), [])
    masters = [one for item in held for one in (item if isinstance(item, list) else [item])]  # can be nested by group
    for inner in value.values():
        yield from ((optimizer, own or masters) for optimizer, own in within(inner, depth + 1))


def take(
    found: Checkpoint,
    file: TorchFile,
    optimizer: Mapping[str, Any],
    name: str,
    label: str = "",
    *,
    masters: Sequence[Any] = (),
    weights: Sequence[Any] = (),
    taken: int | None = None,
) -> dict[Any, Any]:
    """Add an optimizer's findings, settings, and a shard for the moments of each parameter.

    Returns the steps by parameter, and those of groups.
    """
    groups, states = tensor_streams.groups_of(optimizer), tensor_streams.states_of(optimizer)
    steps = tensor_streams.steps_of(file.path, states)
    own = Optimizer(file.path.name, groups, states, steps, masters, weights, file.checksums, taken)
    found.findings += damages.labelled(problems(own), label)
    found.groups += groups
    for number, state in states.items():
        master = masters[number] if type(number) is int and 0 <= number < len(masters) else None
        found.shards += _shard(found, file, f"{name}.{number!s:.100}", label, state, master)
    for group_number, group in enumerate(groups):
        key = "k" if "weight_sum" in group else "step"  # of a schedule-free optimizer
        if key in group:
            steps[f"of group {group_number}"] = group[key]
    return steps


def _shard(
    found: Checkpoint, file: TorchFile, name: str, label: str, state: Mapping[Any, Any], master: Any
) -> Iterator[Shard]:
    """The moments and the main parameter of one parameter, or of a flat buffer, if all have the same shape."""
    values = {**{role: state.get(role) for role in MOMENTS if _are_of_adam(state)}, MASTER: master}
    streams = tensor_streams.streams(found, file.path, name, values)
    headers = [own for role in streams if isinstance(own := values[role], TensorHeader)]
    if len({header.numel for header in headers}) == 1 and headers[0].numel:
        yield Shard(name, label, headers[0].shape, streams, has_rows=MASTER not in streams)


def _are_of_adam(state: Mapping[str, Any]) -> bool:
    """Whether the moments are Adam's. Beside further means of gradients, or lists as SOAP's bases, they are others."""
    further = {str(name) for name in state} - {EXP_AVG, EXP_AVG_SQ, "max_exp_avg_sq"}
    has_lists = any(isinstance(value, (list, dict)) for value in state.values())
    return not has_lists and not any("exp_avg" in name for name in further)
