"""Test a block of elements: a quick test passes most blocks, and a slow test finds the odd elements of the others.

The quick test makes a few passes over a block in the processor's cache. It passes a block only if every element is a
normal number, the main parameters round to the weights, and no square is negative. The slow test finds nothing in
such a block (a property test compares the two).
"""

import functools
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ckpt_patches.formats import elements
from ckpt_patches.formats.checkpoint import EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHT
from ckpt_patches.formats.elements import Block

Codes: TypeAlias = "npt.NDArray[np.uint16]"

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

# exp_avg ~ (1 - beta1) g, exp_avg_sq ~ (1 - beta2) g^2: below this a square may have underflowed to zero.
LARGE_AVG = np.float32(1e-15)

EXPONENT = np.uint32(0x7F800000)
SMALLEST_NORMAL = np.uint32(0x00800000)
# Per dtype: an integer type of the same size, the bits of the smallest normal number, the bits of infinity.
LIMITS = {
    "float32": (np.uint32, SMALLEST_NORMAL, EXPONENT),
    "bfloat16": (np.uint16, np.uint16(0x0080), np.uint16(0x7F80)),
    "float16": (np.uint16, np.uint16(0x0400), np.uint16(0x7C00)),
}
# Half the distance between adjacent numbers, in steps of fp32.
HALF_STEP = {"bfloat16": np.uint32(1 << 15), "float16": np.uint32(1 << 12)}
# A main parameter may be this many halves away: rounding, and a unit of slack for ties and stochastic rounding.
HALVES = 3
# Correction after moving the bits to fp32's positions: the exponent biases of fp32 and fp16 are 127 and 15.
OFFSET = {"bfloat16": np.uint32(0), "float16": np.uint32(112 << 23)}


def is_compared(dtype: str) -> bool:
    """Whether main parameters are compared with weights of this dtype."""
    return dtype in HALF_STEP or dtype in ("float32", "float64")


def is_clean(streams: Mapping[str, tuple[Block, str]]) -> bool:
    """Whether all elements of a block are certainly valid. A quick test, which can return False for a valid block.

    `streams` has the bytes and the dtype of each role.
    """
    if not streams.keys() & NOT_FINITE.keys():
        return True  # not an array: bytes read for their checksums
    if any(dtype != "float32" for role, (_, dtype) in streams.items() if role != WEIGHT):
        return False
    if WEIGHT in streams and MASTER in streams:
        if not _agrees(streams[MASTER][0], *streams[WEIGHT]):
            return False
    elif any(role in streams and not _is_normal(*streams[role]) for role in (WEIGHT, MASTER)):
        return False
    if EXP_AVG in streams and not _is_normal(streams[EXP_AVG][0], "float32"):
        return False
    if EXP_AVG_SQ in streams:
        squares = streams[EXP_AVG_SQ][0].view(np.uint32)
        return bool(squares.max() < EXPONENT and squares.min() > 0)  # a negative number is a large integer
    return True


@functools.lru_cache(maxsize=16)
def _scratch(kind: type[np.generic], numel: int) -> "npt.NDArray[Any]":
    """A reused buffer for one step of the quick test: a new buffer would be mapped again each time."""
    return np.empty(numel, kind)


def _is_normal(data: Block, dtype: str) -> bool:
    """Whether no element is zero, denormal, infinity or NaN. True for integers; False for floats not in `LIMITS`."""
    if dtype not in LIMITS:
        return dtype not in elements.OTHER_FLOATS
    kind, smallest, exponent = LIMITS[dtype]
    magnitude = _magnitude(data.view(kind))
    return bool(magnitude.max() < exponent << kind(1) and magnitude.min() >= smallest << kind(1))


def _magnitude(bits: "npt.NDArray[Any]") -> "npt.NDArray[Any]":
    """The bits without the sign, shifted left by one; valid until the next call."""
    return np.left_shift(bits, bits.dtype.type(1), out=_scratch(bits.dtype.type, len(bits)))


def _agrees(master: Block, weight: Block, dtype: str) -> bool:
    """Whether all masters are normal numbers, and each weight is a nearest number to its master."""
    bits = master.view(np.uint32)
    if dtype == "float32":
        return _is_normal(weight, dtype) and bool((bits == weight.view(np.uint32)).all())
    if dtype not in HALF_STEP:
        return False
    difference = _bits_in_float32(weight, dtype, _scratch(np.uint32, len(bits)))
    np.subtract(bits, difference, out=difference)
    if dtype == "bfloat16":  # a master that rounds to a normal number needs no other test
        return _is_within_half_a_step(difference, dtype) and _is_normal(weight, dtype)
    magnitude = _magnitude(weight.view(np.uint16))
    if magnitude.max() >= 0xF800:  # infinity or NaN
        return False
    # Denormal fp16 weights are valid, but their bits do not measure distance. 2^-14 has a denormal neighbor.
    small = np.flatnonzero(np.less_equal(magnitude, 0x0800, out=_scratch(np.bool_, len(bits))))
    difference[small] = OFFSET[dtype]
    if not _is_within_half_a_step(difference, dtype):
        return False
    return not len(small) or _small_agree(bits[small], weight.view(np.float16)[small])


def _is_within_half_a_step(difference: "npt.NDArray[np.uint32]", dtype: str) -> bool:
    """Whether the bits of all masters minus those of their weights are small enough. False if a sign differs."""
    signed, offset, most = difference.view(np.int32), int(OFFSET[dtype]), HALVES * int(HALF_STEP[dtype])
    return bool(signed.max() <= offset + most and signed.min() >= offset - most)


def _small_agree(master: "npt.NDArray[np.uint32]", weight: "npt.NDArray[np.float16]") -> bool:
    """The same test for fp16 weights up to 2^-14, which are 2^-24 apart."""
    distance = np.abs(master.view(np.float32) - weight.astype(np.float64))
    return bool(distance.max() <= HALVES * 2.0**-25) and _is_normal(master, "float32")


def _bits_in_float32(weight: Block, dtype: str, bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Write the fp32 bits of each weight (normal numbers only), minus `OFFSET`, to `bits`."""
    if dtype == "bfloat16":
        bits[:] = weight.view(np.uint16)
        bits <<= np.uint32(16)
        return bits
    bits.view(np.int32)[:] = weight.view(np.int16)  # sign extension moves the sign to the highest bit
    bits <<= np.uint32(13)
    bits &= np.uint32(0x8FFFE000)
    return bits


def codes(streams: Mapping[str, tuple[Block, str]], numel: int) -> Codes:
    """The code of each element of a block."""
    values = {role: v for role, (data, dtype) in streams.items() if (v := elements.as_float32(data, dtype)) is not None}
    code = np.zeros(numel, np.uint16)
    for role, bit in NOT_FINITE.items():
        if role in values:
            code[~np.isfinite(values[role])] |= np.uint16(bit)
    if streams.keys() <= {WEIGHT, MASTER} and streams.keys() == values.keys():  # no moments
        code[np.logical_and.reduce([np.isinf(value) for value in values.values()])] = np.uint16(INFINITE)
    zero = {role: _is_zero(values[role]) for role in values}
    main = MASTER if MASTER in values else WEIGHT  # a weight beside moments and no master is the main parameter
    for role, bit in ((main, NO_MASTER), (EXP_AVG, NO_AVG), (EXP_AVG_SQ, NO_SQ)):
        if role in zero:
            code[zero[role]] |= np.uint16(bit)
    if EXP_AVG in values and EXP_AVG_SQ in values:
        code[zero[EXP_AVG_SQ] & (values[EXP_AVG] == 0)] |= np.uint16(NO_AVG)  # also -0.0: without a gradient
        code[zero[EXP_AVG_SQ] & (np.abs(values[EXP_AVG]) > LARGE_AVG)] |= np.uint16(AVG_IS_LARGE)
    if EXP_AVG_SQ in values:
        code[values[EXP_AVG_SQ] < 0] |= np.uint16(NEGATIVE)
    _compare_master(values, streams, zero, code)
    return code


def _is_zero(values: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Whether all bytes are zero, as in zarr's fill value; -0.0 is a computed result."""
    return values.view(np.uint32) == 0


def _compare_master(
    values: dict[str, npt.NDArray[np.float32]],
    streams: Mapping[str, tuple[Block, str]],
    zero: dict[str, npt.NDArray[np.bool_]],
    code: Codes,
) -> None:
    """Set the bits of masters that contradict the weight, or without a weight the moments."""
    if WEIGHT in values and MASTER in values:
        weight, dtype = streams[WEIGHT]
        code[zero[MASTER] & (values[WEIGHT] != 0)] |= np.uint16(CONTRADICTED)
        wrong = ~is_nearest(values[MASTER], weight, dtype) & ~zero[MASTER]
        wrong &= np.isfinite(values[MASTER]) & np.isfinite(values[WEIGHT])
        code[wrong] |= np.uint16(UNROUNDED)
        code[wrong & (values[WEIGHT] == 0)] |= np.uint16(NO_WEIGHT)
    elif {EXP_AVG, EXP_AVG_SQ} < values.keys():
        moved = (np.abs(values[EXP_AVG]) > LARGE_AVG) & ~zero[EXP_AVG_SQ]
        code[zero[MASTER if MASTER in values else WEIGHT] & moved] |= np.uint16(CONTRADICTED)


def is_nearest(master: npt.NDArray[np.float32], weight: Block, dtype: str) -> npt.NDArray[np.bool_]:
    """Whether each weight is a nearest number to its master, or next to one: optimizers round in different ways."""
    if dtype == "float32":
        return master == weight.view(np.float32)
    if dtype == "float64":  # a frozen weight can be more precise than its master
        with np.errstate(over="ignore"):
            return master == weight.view(np.float64).astype(np.float32)
    if not is_compared(dtype):
        return np.ones(len(master), np.bool_)
    bits = _bits_in_float32(weight, dtype, np.empty(len(master), np.uint32)) + OFFSET[dtype]
    most = np.uint32(HALVES) * HALF_STEP[dtype]
    nearest = master.view(np.uint32) - bits + most <= 2 * most
    smallest = float(np.finfo(np.float16 if dtype == "float16" else np.float32).tiny)
    nearest &= np.abs(elements.half_as_float32(weight, dtype)) >= smallest  # for denormals, bits are not a distance
    others = np.flatnonzero(~nearest)
    nearest[others] = _is_nearest_exactly(master[others], elements.half_as_float32(weight, dtype)[others], dtype)
    return nearest


def _is_nearest_exactly(
    master: npt.NDArray[np.float32], weight: npt.NDArray[np.float32], dtype: str
) -> npt.NDArray[np.bool_]:
    """The same test by distance, at the larger exponent of the two."""
    smallest_exponent, digits, largest = (-126, 8, 3.3961775e38) if dtype == "bfloat16" else (-14, 11, 65520.0)
    with np.errstate(invalid="ignore"):
        exponent = np.maximum(np.frexp(np.maximum(np.abs(master), np.abs(weight)))[1] - 1, smallest_exponent)
        near = np.abs(master.astype(np.float64) - weight) <= np.ldexp(HALVES * 0.5, exponent - digits + 1)
        overflow = np.isinf(weight) & (np.abs(master) >= largest) & (np.sign(master) == np.sign(weight))
    return near | overflow
