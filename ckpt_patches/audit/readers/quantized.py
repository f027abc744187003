"""Detect weights that a run keeps in fp8 or fp4 and saves in another dtype.

megatron-core saves such weights dequantized, in bf16: a number of a few bits, times the scale of its tensor or block.
Their main parameters do not round to them in bf16, which is correct. Such weights have few different significands per
scale: eight in fp8 (e4m3), two in fp4. Their main parameters are also close to them, unlike those of another model.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_patches.audit.judging.scan import BLOCK, read_values
from ckpt_patches.audit.readers.checkpoint import MASTER, WEIGHT, Shard

FEWEST = 64  # nonzero weights; fewer can have this few significands by chance
MOST_DIGITS = {"bfloat16": 7, "float16": 10, "float32": 23}  # bits of a significand after the point
# Smaller numbers are denormal: the dtype has fewer digits for them, so the significands change.
SMALLEST = {"bfloat16": 2.0**-126, "float16": 2.0**-14, "float32": 2.0**-126}
NO_DIGITS = np.uint32(1 << 30)


class Coarse(NamedTuple):
    """A dtype of a few bits."""

    what: str
    significands: int  # distinct ones per scale
    step: float  # largest relative distance between neighboring numbers
    group: int  # elements of a row that share a scale; 0 if the tensor has one scale


TYPES = (
    Coarse("numbers of fp8 with a scale", 8, 2.0**-3, 0),
    Coarse("numbers of fp8 with scales of blocks", 8, 2.0**-3, 128),
    Coarse("numbers of fp4 with scales of blocks", 2, 2.0**-1, 16),
)


def look(shard: Shard) -> Coarse | None:
    """The low-bit dtype of a shard's weights, if most main parameters are within its step of them; else None.

    Only matrices are checked: runs do not keep vectors in such dtypes.
    """
    weight = shard.streams.get(WEIGHT)
    if weight is None or MASTER not in shard.streams or weight.dtype not in MOST_DIGITS or len(shard.shape) < 2:
        return None
    row = shard.shape[-1]
    left = [coarse for coarse in TYPES if coarse.group <= row]
    seen, smallest, near, total = np.empty(0, np.uint32), np.float32(np.inf), 0, 0
    for begin, end in _pieces(shard.numel, row):
        values = _values(shard, WEIGHT, begin, end)
        found = np.abs(values[values != 0])
        seen = np.union1d(seen, _digits(found[found >= SMALLEST[weight.dtype]], weight.dtype))
        left = [
            coarse
            for coarse in left
            if (
                _fit(values, weight.dtype, min(row, end - begin), coarse)
                if coarse.group
                else len(seen) <= coarse.significands
            )
        ]
        if not left:
            return None
        smallest = min(smallest, found.min(initial=np.float32(np.inf)))
        near += _near(_values(shard, MASTER, begin, end), values, smallest, left[0].step)
        total += len(found)
    if total < FEWEST or len(seen) < 2 or 2 * near < shard.numel:
        return None
    return left[0]


def _pieces(numel: int, row: int) -> Iterator[tuple[int, int]]:
    """Ranges of about one block of elements: full rows, or parts of a row that begin at a group's first element."""
    rows = max(BLOCK // max(row, 1), 1) * row
    step = BLOCK if row > BLOCK else max(rows, 1)
    for first in range(0, numel, max(rows, 1)):
        last = min(first + rows, numel)
        for begin in range(first, last, step):
            yield begin, min(begin + step, last)


def _values(shard: Shard, role: str, begin: int, end: int) -> npt.NDArray[np.float32]:
    values = read_values(shard.streams[role], begin, end)
    return np.zeros(end - begin, np.float32) if values is None else values


def _digits(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.uint32]:
    """The significands of positive numbers, as the bits after the point."""
    return (values.view(np.uint32) & np.uint32(0x7FFFFF)) >> np.uint32(23 - MOST_DIGITS[dtype])


def _fit(values: npt.NDArray[np.float32], dtype: str, row: int, coarse: Coarse) -> bool:
    """Whether no group of elements in a row has more significands than the dtype."""
    width = -(-row // coarse.group) * coarse.group
    table = np.zeros((len(values) // row, width), np.float32)
    table[:, :row] = values.reshape(-1, row)
    magnitude = np.abs(table).reshape(-1, coarse.group)
    digits = np.where(magnitude < SMALLEST[dtype], NO_DIGITS, _digits(magnitude, dtype))
    digits.sort(axis=1)
    different = 1 + (np.diff(digits, axis=1) != 0).sum(axis=1) - (digits[:, -1] == NO_DIGITS)
    return bool((different <= coarse.significands).all())


def _near(master: npt.NDArray[np.float32], weight: npt.NDArray[np.float32], smallest: np.float32, step: float) -> int:
    """The number of main parameters as close to their weights as rounding to such a dtype allows."""
    with np.errstate(invalid="ignore", over="ignore"):
        far = np.maximum(np.abs(weight) * np.float32(step), smallest)
        return int((np.abs(master - weight) <= far).sum())
