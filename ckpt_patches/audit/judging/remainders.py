"""Detect main parameters that hold only the low 16 bits (`store_param_remainders` of Transformer Engine).

Megatron's formats that gather the state store these integers as fp32. They cannot be compared with the bf16 weights.
"""

import numpy as np

from ckpt_patches.formats.checkpoint import MASTER, WEIGHT, Shard
from ckpt_patches.formats.elements import BLOCK, read_values

LARGEST = 1 << 15
FEWEST = 8  # distinct values; a constant is not the remainder of trained weights


def are_in(shard: Shard) -> bool:
    """Whether all main parameters of a shard are 16-bit integers, with several distinct values."""
    weight, master = shard.streams.get(WEIGHT), shard.streams.get(MASTER)
    if weight is None or master is None or (weight.dtype, master.dtype) != ("bfloat16", "float32"):
        return False
    seen = np.empty(0, np.float32)
    for begin in range(0, shard.numel, BLOCK):
        values = read_values(master, begin, min(begin + BLOCK, shard.numel))
        if values is None or not (np.abs(values) <= LARGEST).all() or (values != np.round(values)).any():
            return False
        if len(seen) < FEWEST:
            seen = np.union1d(seen, values)
    return len(seen) >= min(FEWEST, shard.numel)
