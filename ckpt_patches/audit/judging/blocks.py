"""Classify the elements of a block: a quick test passes most blocks, and in the others each element gets a code.

The quick test makes a few passes over a block in the processor's cache. It passes a block only if every element is a
normal number, the main parameters round to the weights, and no square is negative. `codes` finds nothing in such a
block (a property test compares the two).
"""

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ckpt_patches.formats import elements
from ckpt_patches.formats.checkpoint import EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHT
from ckpt_patches.formats.elements import Block

Codes: TypeAlias = "npt.NDArray[np.uint16]"
Values: TypeAlias = "npt.NDArray[np.float32]"

# What is odd about an element: each is one bit of its code.
NO_MASTER = 1  # all bytes of the master are zero
NO_AVG = 2
NO_SQ = 4
CONTRADICTED = 8  # the master is zero, but the weight (without weights: the moments) is not
AVG_IS_LARGE = 16  # the square is zero, but the first moment is too large for that
UNROUNDED = 32  # the master is not zero, and does not round to the weight
NEGATIVE = 64  # the square is negative
NOT_FINITE = {WEIGHT: 256, MASTER: 512, EXP_AVG: 1024, EXP_AVG_SQ: 2048}
INFINITE = 4096  # in a tensor without moments, such as an attention mask, or the least loss before the first one
NO_WEIGHT = 8192  # unrounded, and the weight is zero

# Bits that can be damage in a single element.
CERTAIN = (CONTRADICTED, UNROUNDED, NO_WEIGHT, NEGATIVE, *NOT_FINITE.values(), INFINITE)

# exp_avg ~ (1 - beta1) g, exp_avg_sq ~ (1 - beta2) g^2: below this a square may have underflowed to zero, by its dtype.
LARGE_AVG = {**dict.fromkeys(("float64", "float32", "bfloat16"), np.float32(1e-15)), "float16": np.float32(2.0**-5)}

FLOAT32 = np.finfo(np.float32)
# Weights that are rounded main parameters, by dtype: significant bits, and the exponent of the smallest normal number.
ROUNDED = {"bfloat16": (8, -126), "float16": (11, -14)}
# A main parameter may be this many units away: half of one for rounding, and one for ties and stochastic rounding.
UNITS = 1.5


def is_compared(dtype: str) -> bool:
    """Whether main parameters are compared with weights of this dtype."""
    return dtype in ROUNDED or dtype in ("float32", "float64")


def is_clean(streams: Mapping[str, tuple[Block, str]]) -> bool:
    """Whether all elements of a block are certainly valid. A quick test, which can return False for a valid block.

    `streams` has the bytes and the dtype of each role.
    """
    if not streams.keys() & NOT_FINITE.keys():
        return True  # not an array: bytes read for their checksums
    for role, (data, dtype) in streams.items():
        if dtype != "float32" and (role != WEIGHT or dtype in elements.OTHER_FLOATS):
            return False
        values = elements.as_float32(data, dtype)
        if values is None:  # integers
            if MASTER in streams:
                return False
        elif role == EXP_AVG_SQ:
            if not (values.min() > 0 and values.max() <= FLOAT32.max):
                return False
        elif role == WEIGHT and MASTER in streams:
            if not _are_near(streams[MASTER][0].view(np.float32), values, dtype):
                return False
        elif not _are_normal(values):
            return False
    return True


def _are_normal(values: Values) -> bool:
    """Whether no element is zero, denormal, infinity or NaN, which no comparison with NaN is."""
    size = np.abs(values)
    return bool(size.min() >= FLOAT32.tiny and size.max() <= FLOAT32.max)


def _are_near(master: Values, weight: Values, dtype: str) -> bool:
    """Whether each main parameter is within the smallest distance that `_rounds` allows. False for NaN."""
    if dtype not in ROUNDED:
        return bool((master == weight).all())
    digits, exponent = ROUNDED[dtype]
    near = np.maximum(np.abs(weight), np.float32(2.0**exponent))
    near *= np.float32(UNITS * 2.0**-digits)
    return bool(near.max() <= FLOAT32.max and (np.abs(master - weight) <= near).all())


def codes(streams: Mapping[str, tuple[Block, str]], numel: int) -> Codes:
    """The code of each element of a block."""
    values = {role: v for role, (data, dtype) in streams.items() if (v := elements.as_float32(data, dtype)) is not None}
    code = np.zeros(numel, np.uint16)

    def mark(chosen: npt.NDArray[np.bool_], bit: int) -> None:
        code[chosen] |= np.uint16(bit)

    for role, bit in NOT_FINITE.items():
        if role in values:
            mark(~np.isfinite(values[role]), bit)
    if streams.keys() <= {WEIGHT, MASTER} and streams.keys() == values.keys():  # no moments
        code[np.logical_and.reduce([np.isinf(value) for value in values.values()])] = np.uint16(INFINITE)
    # All bytes are zero, as in zarr's fill value; -0.0 is a computed result.
    zero = {role: own.view(np.uint32) == 0 for role, own in values.items()}
    main = MASTER if MASTER in values else WEIGHT  # a weight beside moments and no master is the main parameter
    for role, bit in ((main, NO_MASTER), (EXP_AVG, NO_AVG), (EXP_AVG_SQ, NO_SQ)):
        if role in zero:
            mark(zero[role], bit)
    if EXP_AVG_SQ in values:
        mark(values[EXP_AVG_SQ] < 0, NEGATIVE)
    is_large = np.zeros(numel, np.bool_)
    if {EXP_AVG, EXP_AVG_SQ} <= values.keys():
        is_large = np.abs(values[EXP_AVG]) > LARGE_AVG.get(streams[EXP_AVG_SQ][1], np.float32(np.inf))
        mark(zero[EXP_AVG_SQ] & (values[EXP_AVG] == 0), NO_AVG)  # also -0.0: without a gradient
        mark(zero[EXP_AVG_SQ] & is_large, AVG_IS_LARGE)
    if WEIGHT in values and MASTER in values:
        master, weight = values[MASTER], values[WEIGHT]
        mark(zero[MASTER] & (weight != 0), CONTRADICTED)
        wrong = ~_rounds(master, weight, streams[WEIGHT][1]) & ~zero[MASTER]
        wrong &= np.isfinite(master) & np.isfinite(weight)
        mark(wrong, UNROUNDED)
        mark(wrong & (weight == 0), NO_WEIGHT)
    elif main in values and is_large.any():
        mark(zero[main] & is_large & ~zero[EXP_AVG_SQ], CONTRADICTED)
    return code


def _rounds(master: Values, weight: Values, dtype: str) -> npt.NDArray[np.bool_]:
    """Whether each weight is a nearest number to its master, or next to one, at the larger exponent of the two."""
    if dtype not in ROUNDED:
        return master == weight if is_compared(dtype) else np.ones(len(master), np.bool_)
    digits, smallest = ROUNDED[dtype]
    exponent = np.maximum(np.frexp(np.maximum(np.abs(master), np.abs(weight)))[1] - 1, smallest)
    with np.errstate(invalid="ignore"):
        distance = np.abs(master.astype(np.float64) - weight)
    near: npt.NDArray[np.bool_] = distance <= np.ldexp(UNITS, exponent - digits + 1)
    return near
