"""Detect weights that a run keeps in fp8 or fp4 and saves in another dtype.

megatron-core saves such weights dequantized, in bf16: a number of a few bits, times the scale of its tensor or block.
Their main parameters do not round to them in bf16, which is correct, but they are near.
"""

import numpy as np
import numpy.typing as npt

from ckpt_patches.formats.checkpoint import MASTER, WEIGHT, Shard
from ckpt_patches.formats.elements import BLOCK, read_values

GROUP = 128  # elements; no scale is of more, but that of a whole tensor
MOST = 32  # different significands in a group; of 128 ordinary numbers in bf16 some 80 are different
FAR = np.float32(0.25)  # relative distance that no rounding exceeds: fp4 has one bit after the point


def are_near(shard: Shard) -> bool:
    """Whether at least half of the main parameters are as near to their weights as numbers of few bits are."""
    near, smallest = 0, np.float32(np.inf)
    for begin in range(0, shard.numel, BLOCK):
        end = min(begin + BLOCK, shard.numel)
        master, weight = (read_values(shard.streams[role], begin, end) for role in (MASTER, WEIGHT))
        if master is None or weight is None:
            return False
        size = np.abs(weight)
        smallest = min(smallest, size[size > 0].min(initial=np.float32(np.inf)))
        with np.errstate(invalid="ignore", over="ignore"):
            near += int((np.abs(master - weight) <= np.maximum(size * FAR, smallest)).sum())
    return 2 * near >= shard.numel


def are_in(shard: Shard) -> bool:
    """Whether the weights of most groups of a shard have few significands, and not all the same one."""
    different = np.concatenate(
        [_significands(shard, begin) for begin in range(0, shard.numel - GROUP + 1, BLOCK)] or [[]]
    )
    return len(different) > 0 and 2 * int((different <= MOST).sum()) > len(different) and int(different.max()) > 1


def _significands(shard: Shard, begin: int) -> npt.NDArray[np.int64]:
    """The number of different significands in each group of a block."""
    end = min(begin + BLOCK, shard.numel)
    weight = read_values(shard.streams[WEIGHT], begin, end - (end - begin) % GROUP)
    if weight is None:
        return np.empty(0, np.int64)
    digits = np.sort((weight.view(np.uint32) & np.uint32(0x7FFFFF)).reshape(-1, GROUP), axis=1)
    return 1 + (np.diff(digits, axis=1) != 0).sum(axis=1)
