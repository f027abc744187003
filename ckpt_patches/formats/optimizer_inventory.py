"""What an optimizer's state dict must hold by what it states itself: torch's `state` and `param_groups`. Pure.

https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.state_dict.html
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_patches.formats import settings
from ckpt_patches.formats.torch_file import TensorHeader
from ckpt_patches.formats.zero_inventory import (
    ABSENT_STATE,
    ABSENT_WEIGHT,
    CONTRADICTION,
    FOREIGN,
    UNUSUAL,
    Problem,
)
from ckpt_patches.runtime.shown import shown

# Settings that every group of one optimizer has, whatever its user adds to some of them.
OF_ADAM = ("betas", "eps", "weight_decay", "amsgrad", "bias_correction", "decoupled_weight_decay")
OF_TORCH = ("momentum", "maximize", "foreach", "capturable", "differentiable", "fused")
SHARED = {*OF_ADAM, *OF_TORCH}
# States with an element for each of the parameter's; Adafactor's rows and columns, and Shampoo's factors, have not.
OF_ELEMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg", "master_param")
OF_MATRICES = ("row_var", "col_var", "_row", "_col")  # ends of the names of Adafactor's, in torch and Transformers


@dataclass(frozen=True)
class Optimizer:
    """One of a file."""

    where: str  # the file's name
    groups: Sequence[Mapping[str, Any]]  # param groups
    states: Mapping[Any, Mapping[str, Any]]  # by the parameter's number; tensors are headers
    steps: Mapping[Any, Any]  # by the parameter's number, of those that have one; a number if it could be read
    masters: Sequence[Any] = ()  # in the order of the parameters; empty where the file has none
    weights: Sequence[Any] = ()  # of the model, in any order
    checksums: Mapping[int, int] = field(default_factory=dict)  # CRC-32 by offset, of tensors that are not all zeros
    taken: int | None = None  # steps, as the trainer has counted them; None where nothing tells

    @property
    def parameters(self) -> list[tuple[int, Any]]:
        """Group and number of each."""
        groups = [(n, group.get("params")) for n, group in enumerate(self.groups)]
        return [(n, param) for n, params in groups if isinstance(params, (list, tuple)) for param in params]


def problems(optimizer: Optimizer) -> Iterator[Problem]:
    """All that contradicts or is absent."""
    where = optimizer.where
    for what in (
        *settings.not_groups(optimizer.groups),
        *settings.not_numbers({f"group {n}": group for n, group in enumerate(optimizer.groups)}),
        *settings.not_steps({f"step of parameter {shown(n)}": step for n, step in optimizer.steps.items()}),
    ):
        yield Problem(CONTRADICTION, where, what)
    yield from _keys(optimizer)
    yield from _states(optimizer)
    yield from _masters(optimizer)
    yield from _steps(optimizer)


def _keys(optimizer: Optimizer) -> Iterator[Problem]:
    """Groups of one optimizer have the same settings; of a mixed one, such as Muon with Adam, each kind has its own."""
    for what in settings.unlike_groups([{k: v for k, v in group.items() if k in SHARED} for group in optimizer.groups]):
        yield Problem(UNUSUAL, optimizer.where, what)
    if any("exp_avg_sq" in state for state in optimizer.states.values()):
        for number, group in enumerate(optimizer.groups):
            if "exp_avg" in _promised(optimizer, number) and "betas" not in group:
                yield Problem(CONTRADICTION, optimizer.where, f"group {number} has no betas, and moments of Adam")


def _promised(optimizer: Optimizer, group: int, like: Mapping[Any, Any] | None = None) -> set[str]:
    """The states that any parameter of the same kind of group has; or those with as many dimensions as `like` alone.

    Adafactor has other states for matrices than for vectors.
    """
    keys = optimizer.groups[group].keys()
    same = {n for n, other in enumerate(optimizer.groups) if other.keys() == keys}
    own = [optimizer.states.get(param) or {} for n, param in optimizer.parameters if n in same and _is_key(param)]
    if like is not None and (dimensions := _dimensions(like)):
        own = [state for state in own if _dimensions(state) == dimensions]
    return {str(name) for state in own for name, value in state.items() if value is not None}


def _dimensions(state: Mapping[Any, Any]) -> int:
    return max((len(value.shape) for value in state.values() if isinstance(value, TensorHeader)), default=0)


def _is_key(value: Any) -> bool:
    return isinstance(value, (int, str))


def _states(optimizer: Optimizer) -> Iterator[Problem]:
    """Each parameter has the states that others of its kind have, of the same number of elements."""
    where, parameters = optimizer.where, [(n, p) for n, p in optimizer.parameters if _is_key(p)]
    promised = {n: _promised(optimizer, n) for n in range(len(optimizer.groups))}
    is_mixed = any(name.endswith(OF_MATRICES) for own in promised.values() for name in own)
    for group, number in parameters:
        state = optimizer.states.get(number)
        if not state:
            if promised[group]:
                yield Problem(
                    UNUSUAL,
                    where,
                    f"parameter {shown(number)} has no state: a frozen one, or one that the run does not use",
                )
            continue
        expected = _promised(optimizer, group, state) if is_mixed else promised[group]
        for name in sorted(expected - {str(name) for name, value in state.items() if value is not None}):
            yield Problem(ABSENT_STATE, where, f"parameter {shown(number)} has no {shown(name)}")
        tensors = {str(name): value for name, value in state.items() if isinstance(value, TensorHeader) and value.shape}
        if len({tensor.shape for name, tensor in tensors.items() if name in OF_ELEMENTS}) > 1:
            yield Problem(CONTRADICTION, where, f"states of parameter {shown(number)} have different shapes")
        moments = [
            t for name, t in tensors.items() if not name.startswith("max_") and t.numel > 1
        ]  # AMSGrad's are equal
        crcs = [crc for tensor in moments if (crc := optimizer.checksums.get(tensor.offset))]
        if len(set(crcs)) < len(crcs):
            yield Problem(FOREIGN, where, f"two states of parameter {shown(number)} are the same, bit for bit")
    for number in sorted(optimizer.states.keys() - {number for _, number in parameters}, key=str)[:5]:
        yield Problem(FOREIGN, where, f"a state of {shown(number)}, which no param group names")


def _masters(optimizer: Optimizer) -> Iterator[Problem]:
    """One for each parameter, of its states' shape."""
    if not optimizer.masters:
        return
    count = len(optimizer.parameters)
    if len(optimizer.masters) != count:
        detail = f"{len(optimizer.masters)} main parameters, {count} in the param groups"
        yield Problem(ABSENT_STATE, optimizer.where, detail)
        return
    for (_, number), master in zip(optimizer.parameters, optimizer.masters, strict=True):
        state = optimizer.states.get(number) if _is_key(number) else None
        shapes = {value.shape for value in (state or {}).values() if isinstance(value, TensorHeader) and value.shape}
        if isinstance(master, TensorHeader) and shapes and master.shape not in shapes:
            detail = f"the main parameter {shown(number)} has another shape than its states"
            yield Problem(CONTRADICTION, optimizer.where, detail)
    yield from _weights(optimizer)


def _weights(optimizer: Optimizer) -> Iterator[Problem]:
    """As many of each shape in the model as there are main parameters; those of a group can be one flat tensor."""
    shapes = {
        called: Counter(tensor.shape for tensor in tensors if isinstance(tensor, TensorHeader))
        for called, tensors in (("masters", optimizer.masters), ("weights", optimizer.weights))
    }
    if not optimizer.weights or any(len(shape) > 1 for shape in shapes["weights"]) > any(
        len(shape) > 1 for shape in shapes["masters"]
    ):
        return
    for shape, count in (shapes["masters"] - shapes["weights"]).items():
        detail = f"{count} main parameters of the shape {shown(tuple(shape))} have no weight in the model"
        yield Problem(ABSENT_WEIGHT, optimizer.where, detail)


def _steps(optimizer: Optimizer) -> Iterator[Problem]:
    """Those of all parameters, and the trainer's."""
    steps = sorted({step for step in optimizer.steps.values() if settings.is_step(step)})
    if len(steps) > 1:
        found = ", ".join(f"{step:g}" for step in steps[:5])
        yield Problem(UNUSUAL, optimizer.where, f"parameters are at different steps: {found}")
    # One more where DeepSpeed takes a step with zero gradients at the start, to allocate the states.
    elif steps and optimizer.taken is not None and int(steps[0]) not in (optimizer.taken, optimizer.taken + 1):
        detail = f"the engine has counted {optimizer.taken} steps, the optimizer {steps[0]:g}"
        yield Problem(UNUSUAL, optimizer.where, detail)
