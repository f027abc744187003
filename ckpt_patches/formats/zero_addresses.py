"""Where parameters lie in the flat buffers of ZeRO 1 and 2: in the order in which the optimizer flattened them. Pure.

A rank's `param_slice_mappings` has the address of each fragment. With `round_robin_gradients` DeepSpeed flattens a
group in another order than the one that it computes these addresses from; `param_shapes` has that of the buffer.
https://github.com/deepspeedai/DeepSpeed/blob/v0.19.2/deepspeed/runtime/zero/stage_1_and_2.py
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_patches.formats.torch_file import BadFileError
from ckpt_patches.formats.zero import Partition, Shape

Fragments = dict[str, tuple[int, int]]  # by parameter: start in the partition, elements
ALIGNMENT = "param_alignment_paddings"  # by group, for each parameter; where one is not 0 the addresses are right


def is_round_robin(config: Any) -> bool:
    """Whether the configuration that a checkpoint holds has `round_robin_gradients`."""
    own = config.get("zero_optimization") if isinstance(config, dict) else None
    return isinstance(own, dict) and own.get("round_robin_gradients") is True


def in_written_order(
    ranks: Sequence[Sequence[Partition]], shapes: Sequence[Mapping[str, Shape]], where: str
) -> list[tuple[Partition, ...]]:
    """The partitions of all data-parallel ranks of a `round_robin_gradients` run, with the addresses of the buffer.

    Args:
        ranks: by data-parallel rank, its partition of each group.
        shapes: by group, of the parameters in the order of the buffer.
        where: the folder, for an error.

    Raises:
        BadFileError: which addresses are right cannot be determined.
    """
    groups = list(zip(*ranks, strict=True))
    fixed = [
        _group(group, shapes[n] if n < len(shapes) else {}, f"{where}: group {n}") for n, group in enumerate(groups)
    ]
    return list(zip(*fixed, strict=True)) if fixed else [() for _ in ranks]


def _group(parts: Sequence[Partition], shapes: Mapping[str, Shape], where: str) -> list[Partition]:
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
    """Those in one rank's partition, which begins at an element of the buffer."""
    found: Fragments = {}
    begin = 0
    for name, numel in sizes.items():
        low, high = max(begin, first), min(begin + numel, first + size)
        if low < high:
            found[name] = (low - first, high - low)
        begin += numel
    return found
