"""Compare what ranks have in memory: the full tensors and settings of a run, in any layout."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from trainers.ranks import gathered as gathered

State = dict[str, Any]


class Part(NamedTuple):
    """The part of a tensor that this rank holds. `local` is a view of the rank's memory."""

    name: str  # the parameter's name and the kind: "weight", "fp32", or an optimizer state
    local: torch.Tensor  # flat
    where: torch.Tensor | int  # the indices in the full flat tensor, or the first index
    numel: int  # the size of the full tensor


def of_ranks(parts: Iterable[Part]) -> list[list[Part]]:
    """Return copies of the parts of every rank. They travel as bytes: upstream's unpicklers of tensors are slow."""
    own = [(name, _packed(local), _packed(where), numel) for name, local, where, numel in parts]
    return [
        [Part(name, _unpacked(local), _unpacked(where), numel) for name, local, where, numel in of_rank]
        for of_rank in gathered(own)
    ]


def _packed(value: torch.Tensor | int) -> Any:
    return (str(value.dtype), bytes(bits(value).cpu().numpy())) if isinstance(value, torch.Tensor) else value


def _unpacked(value: Any) -> Any:
    if isinstance(value, int):
        return value
    dtype = getattr(torch, value[0].removeprefix("torch."))
    return torch.frombuffer(bytearray(value[1]), dtype=dtype) if value[1] else torch.empty(0, dtype=dtype)


def whole(parts: list[list[Part]]) -> State:
    """Return the full tensors by name. They are the same on each rank if the state is correct.

    Elements that no rank has are NaN, or -1 in an integer tensor.
    This rank's parts come last, so they override the copies of other ranks.
    """
    found: State = {}
    for of_rank in [*parts, parts[dist.get_rank()]]:
        for name, local, where, numel in of_rank:
            fill = torch.nan if local.is_floating_point() else -1
            full = found.setdefault(name, torch.full((numel,), fill, dtype=local.dtype))
            full[_at(where, local)] = local
    return found


def _at(where: torch.Tensor | int, local: torch.Tensor) -> torch.Tensor | slice:
    return where if isinstance(where, torch.Tensor) else slice(where, where + local.numel())


def put(parts: Iterable[Part], state: State) -> None:
    """Set this rank's memory to a state."""
    with torch.no_grad():
        for name, local, where, _ in parts:
            local.copy_(state[name][_at(where, local)])


def on_any_rank(names: Iterable[str]) -> list[str]:
    """The names from all ranks: a rank's own data, such as its copy of the weights, may be wrong only there."""
    return sorted(set().union(*gathered(list(names))))


def different(found: State, expected: State) -> list[str]:
    """The names of values that are not the same, or only in one of the two."""
    return [key for key in sorted({*found, *expected}) if not alike(found.get(key), expected.get(key))]


def alike(one: Any, other: Any) -> bool:
    """Return whether two values are equal; tensors must be equal bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return bool(bits(one).equal(bits(other)))
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return float(one) == float(other)
    return repr(one) == repr(other)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def is_nothing(*states: Any) -> bool:
    """Return whether all given states are zero or missing. A fresh optimizer has zeros or no state."""
    given = [state for state in states if state is not None]
    return all(
        not state.any() if isinstance(state, torch.Tensor) else state in ([], 0.0, [0.0], [1.0]) for state in given
    )
