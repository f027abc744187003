"""Positions of parameters in the flat buffers of ZeRO 1 and 2, in the order in which they were flattened. Pure.

A rank's `param_slice_mappings` has the address of each fragment. With `round_robin_gradients` DeepSpeed computes these
addresses from another order than the one in which it flattens a group. `param_shapes` has the order of the buffer. The
addresses are correct in groups in which `parameter_alignment` (since 0.19.7) pads a parameter, and in no others.
https://github.com/deepspeedai/DeepSpeed/blob/v0.19.2/deepspeed/runtime/zero/stage_1_and_2.py
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_patches.formats.torch_file import BadFileError
from ckpt_patches.formats.zero import MASTER, MOMENTUM, Partition, Shape
from ckpt_patches.formats.zero_inventory import is_expert

Fragments = dict[str, tuple[int, int]]  # by parameter: start in the partition, elements


def is_round_robin(config: Any) -> bool:
    """Whether the configuration in a checkpoint enables `round_robin_gradients`."""
    own = config.get("zero_optimization") if isinstance(config, dict) else None
    return isinstance(own, dict) and own.get("round_robin_gradients") is True


def corrected(
    ranks: Sequence[Sequence[Partition]], shapes: Sequence[Mapping[str, Shape]], where: str, *, is_round_robin: bool
) -> list[tuple[Partition, ...]]:
    """All data-parallel ranks' partitions with the addresses in the buffers, also in Muon's momentum.

    Args:
        ranks: by data-parallel rank, its partition of each group.
        shapes: by group, the parameters' shapes in the order of the buffer.
        where: the folder, for error messages.
        is_round_robin: whether the run had `round_robin_gradients`.

    Raises:
        BadFileError: the correct addresses cannot be determined.
    """
    every = {name: shape for group in shapes for name, shape in group.items()}
    groups = []
    for number, parts in enumerate(zip(*ranks, strict=True)):
        own: Sequence[Partition] = parts
        if is_round_robin:
            own = _in_written_order(own, shapes[number] if number < len(shapes) else {}, f"{where}: group {number}")
        groups.append(_with_momentum(own, every))
    return list(zip(*groups, strict=True)) if groups else [() for _ in ranks]


def _in_written_order(parts: Sequence[Partition], shapes: Mapping[str, Shape], where: str) -> list[Partition]:
    size = max(flat.numel for part in parts for flat in part.states.values())
    stated = sorted(
        (rank * size + start, numel, name)
        for rank, part in enumerate(parts)
        for name, (start, numel) in part.fragments.items()
        if numel
    )
    order = list(dict.fromkeys(name for _, _, name in stated))
    sizes = {name: numel for name, shape in shapes.items() if (numel := math.prod(shape))}
    if order == list(sizes):
        return list(parts)
    ends = itertools.accumulate(numel for _, numel, _ in stated)
    is_dense = all(begin == end - numel for (begin, numel, _), end in zip(stated, ends, strict=True))
    if set(order) != set(sizes) or not is_dense:
        raise BadFileError(
            f"{where}: expected the fragments of a round_robin_gradients run one after another, of the parameters in "
            f"param_shapes, found {len(order)} of {len(sizes)} parameters; where each lies cannot be determined"
        )
    return [replace(part, fragments=_fragments(sizes, rank * size, size)) for rank, part in enumerate(parts)]


def _fragments(sizes: Mapping[str, int], first: int, size: int) -> Fragments:
    """The fragments in the partition that has `size` elements from element `first` of the buffer."""
    found: Fragments = {}
    begin = 0
    for name, numel in sizes.items():
        low, high = max(begin, first), min(begin + numel, first + size)
        if low < high:
            found[name] = (low - first, high - low)
        begin += numel
    return found


def _with_momentum(parts: Sequence[Partition], shapes: Mapping[str, Shape]) -> list[Partition]:
    """Add the addresses in Muon's momentum.

    A rank has the momentum of all elements of each parameter with a fragment in its partition (without experts, whose
    parameters not all ranks share) or, with a CPU optimizer, of its partition. Otherwise it goes to `others`.
    """
    held = [part.momentum.numel for part in parts if part.momentum]
    if not held:
        return list(parts)
    own = [[name for name, (_, numel) in sorted(part.fragments.items(), key=lambda f: f[1]) if numel] for part in parts]
    wholes = [[math.prod(shapes.get(name, ())) for name in names] for names in own]
    all_share = not any(map(is_expert, shapes))
    if all_share and held == [sum(sizes) for part, sizes in zip(parts, wholes, strict=True) if part.momentum]:
        return [
            replace(part, wholes=_places(names, sizes)) for part, names, sizes in zip(parts, own, wholes, strict=True)
        ]
    size = max(part.states[MASTER].numel for part in parts)
    if all(part.momentum is None or part.states[MASTER].numel <= part.momentum.numel <= size for part in parts):
        return [
            replace(part, states={**part.states, MOMENTUM: part.momentum}, momentum=None) if part.momentum else part
            for part in parts
        ]
    return [replace(part, others=(*part.others, MOMENTUM), momentum=None) if part.momentum else part for part in parts]


def _places(names: Sequence[str], sizes: Sequence[int]) -> Fragments:
    starts = itertools.accumulate(sizes, initial=0)
    return {name: (start, size) for name, start, size in zip(names, starts, sizes, strict=False)}
