"""Mixtures of experts: which expert-parallel rank holds which experts.

In layers of `deepspeed.moe` each expert is a module. A rank numbers its own from 0, so that ranks have different
experts under the same name. AutoEP stacks the experts of a layer in three parameters.
https://www.deepspeed.ai/tutorials/mixture-of-experts/
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_patches.errors import UserError
from ckpt_patches.formats.zero import Shape

AUTOEP = ("ds_autoep_layers", "autoep_layers")  # keys of a model-states file
LOCAL = re.compile(r"(.*deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..+)")
# In folder names, so that a rank that numbers its experts from 0 finds no folder, instead of another rank's experts.
GLOBAL = "global_"
DATA_FIRST = "use_data_before_expert_parallelism"


@dataclass(frozen=True)
class LocalExpert:
    """A parameter name under which each expert-parallel rank has another expert's parameter."""

    names: tuple[str, ...]  # by expert-parallel rank, with the expert's global number
    folders: tuple[str, ...]  # of the output
    ranks: tuple[tuple[int, ...], ...]  # data-parallel, by expert-parallel rank


def local_experts(
    path: Path, groups: Sequence[Iterable[str]], sharing: Sequence[int], dp_degree: int, neighbours: bool
) -> dict[str, LocalExpert]:
    """The experts' parameters in layers of `deepspeed.moe`. `groups` has the names, `sharing` the ranks per group.

    Raises:
        UserError: a group mixes parameters of experts and others, or its ranks do not divide evenly.
    """
    matches = [{name: LOCAL.fullmatch(name) for name in names} for names in groups]
    held: dict[str, set[str]] = {}  # by layer; its experts may be in several groups
    for known in (match for of_group in matches for match in of_group.values() if match):
        held.setdefault(known[1], set()).add(known[2])
    found = {}
    for group, of_group in enumerate(matches):
        if not any(of_group.values()):
            continue
        if not all(of_group.values()) or group >= len(sharing) or sharing[group] < 1 or dp_degree % sharing[group]:
            raise UserError(f"{path}: expected the ranks that share group {group}, of experts alone, found {sharing}")
        ranks = ranks_of(dp_degree, dp_degree // sharing[group], neighbours)
        for name, match in of_group.items():
            if match:
                numbers = [ep * len(held[match[1]]) + int(match[2]) for ep in range(len(ranks))]
                names = tuple(f"{match[1]}{number}{match[3]}" for number in numbers)
                folders = tuple(f"{match[1]}{GLOBAL}{number}{match[3]}" for number in numbers)
                found[name] = LocalExpert(names, folders if len(ranks) > 1 else names, ranks)
    return found


def check_local(
    path: Path, known: Mapping[str, LocalExpert], shapes: Mapping[str, Shape], files: Mapping[str, Shape]
) -> None:
    """Check that the optimizer has the same experts as the expert files. `files` has shapes by the names in these.

    Raises:
        UserError: an expert has no file, no state, or other shapes.
    """
    own = {name: shapes[local] for local, expert in known.items() for name in expert.names}
    for name, shape in own.items():
        if files.get(name) != shape:
            raise UserError(
                f"{path}: expected {name} of the shape {shape} in a file layer_*_expert_*, found {files.get(name)}"
            )
    numbered = {match[1] + match[2] for match in map(LOCAL.fullmatch, own) if match}
    for name in files:
        match = LOCAL.fullmatch(name)
        if match and match[1] + match[2] not in numbered:
            raise UserError(f"{path}: expected the optimizer's state of the expert {match[1]}{match[2]}, found none")


def shares_with_neighbours(model: Mapping[str, Any]) -> bool:
    """Whether a model-states file states that neighboring ranks have the same experts."""
    config = model.get("ds_config")
    return isinstance(config, dict) and config.get(DATA_FIRST) is True


def ranks_of(dp_degree: int, ep_degree: int, neighbours: bool) -> tuple[tuple[int, ...], ...]:
    """The data-parallel ranks of each expert-parallel rank: neighbors, or every `ep_degree`th.

    Raises:
        UserError: the ranks do not divide evenly.
    """
    if ep_degree < 1 or dp_degree % ep_degree:
        raise UserError(
            f"{dp_degree} data-parallel ranks cannot be {ep_degree} expert-parallel ones, and equally many each"
        )
    each = dp_degree // ep_degree
    if neighbours:
        return tuple(tuple(range(ep * each, (ep + 1) * each)) for ep in range(ep_degree))
    return tuple(tuple(range(ep, dp_degree, ep_degree)) for ep in range(ep_degree))
