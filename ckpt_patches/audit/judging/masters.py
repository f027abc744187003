"""Numbers of few bits: weights to which right main parameters do not round, moments, and remainders of 16 bits.

A run with weights of fp8 or fp4 saves them dequantized, in bf16: a number of a few bits, times the scale of its tensor
or block. Main parameters are near to them. Transformer Engine's `store_param_remainders` keeps the low 16 bits of main
parameters alone, which Megatron's formats that gather the state store as fp32.
"""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ckpt_patches.formats.checkpoint import MASTER, WEIGHT, Shard, Stream
from ckpt_patches.formats.elements import BLOCK, read_values

Values: TypeAlias = "npt.NDArray[np.float32]"

GROUP = 128  # elements; no scale is of more, but that of a whole tensor
OF_ONE_SCALE = 8  # significands of e4m3, which has three bits after the point
MOST = 32  # different significands in a group; of 128 ordinary numbers in bf16 some 80 are different
FAR = np.float32(0.25)  # relative distance that no rounding exceeds: fp4 has one bit after the point
LARGEST = 1 << 15  # of a remainder
FEWEST = 8  # distinct remainders; a constant is not the remainder of trained weights


def _blocks(shard: Shard) -> Iterator[tuple[Values, Values]]:
    """The main parameters and weights, in blocks; nothing if there are not both, as numbers."""
    for begin in range(0, shard.numel if {MASTER, WEIGHT} <= shard.streams.keys() else 0, BLOCK):
        end = min(begin + BLOCK, shard.numel)
        master, weight = (read_values(shard.streams[role], begin, end) for role in (MASTER, WEIGHT))
        if master is not None and weight is not None:
            yield master, weight


def are_near(shard: Shard) -> bool:
    """Whether at least half of the main parameters are as near to their weights as numbers of few bits are."""
    near, smallest = 0, np.float32(np.inf)
    for master, weight in _blocks(shard):
        size = np.abs(weight)
        smallest = min(smallest, size[size > 0].min(initial=np.float32(np.inf)))
        with np.errstate(invalid="ignore", over="ignore"):
            near += int((np.abs(master - weight) <= np.maximum(size * FAR, smallest)).sum())
    return 2 * near >= shard.numel


def have_few_bits(shard: Shard) -> bool:
    """Whether the weights of a shard have few significands."""
    return _are_few(weight for _, weight in _blocks(shard))


def was_of_8_bits(moment: Stream, *, if_few: bool) -> bool:
    """Whether a moment was of 8 bits and a scale, as with Transformer Engine: but for zeros it has few significands.

    `if_few`: the answer where it has too few numbers to tell.
    """
    values = read_values(moment, 0, min(BLOCK, moment.numel))
    if values is None:
        return False
    values = values[values != 0]
    return if_few if len(values) <= OF_ONE_SCALE else _are_few([values], min(GROUP, len(values)))


def _are_few(blocks: Iterable[Values], size: int = GROUP) -> bool:
    """Whether most groups of so many numbers have few significands, and not all the same one."""
    every = few = most = 0
    for values in blocks:
        groups = values[: len(values) // size * size].view(np.uint32).reshape(-1, size)
        different = 1 + (np.diff(np.sort(groups & np.uint32(0x7FFFFF), axis=1), axis=1) != 0).sum(axis=1)
        every += len(different)
        few += int((different <= max(OF_ONE_SCALE, size * MOST // GROUP)).sum())
        most = max(most, int(different.max(initial=0)))
    return 2 * few > every and most > 1


def are_remainders(shard: Shard) -> bool:
    """Whether all main parameters of a shard are 16-bit integers, with several distinct values, not zeros alone."""
    dtypes = [shard.streams[role].dtype for role in (WEIGHT, MASTER) if role in shard.streams]
    seen = np.empty(0, np.float32)
    for master, _ in _blocks(shard) if dtypes == ["bfloat16", "float32"] else ():
        if not (np.abs(master) <= LARGEST).all() or (master != np.round(master)).any():
            return False
        if len(seen) < FEWEST:
            seen = np.union1d(seen, master)
    return bool(seen.any()) and len(seen) >= min(FEWEST, shard.numel)
