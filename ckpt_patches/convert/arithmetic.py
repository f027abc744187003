"""Parameters that are computed and not only copied, with NumPy, bit for bit as torch computes them.

NumPy is imported only for these; torch, whose import takes a second, never. A bfloat16, which NumPy lacks, is the upper
half of a float32.
"""

from typing import Any

from ckpt_patches.convert.output_files import Content
from ckpt_patches.convert.reading import Shares
from ckpt_patches.errors import UserError
from ckpt_patches.formats.dtypes import ITEM_SIZE

try:
    import numpy as np
except ImportError:
    raise UserError("averaged parameters and weights that are converted to float32 need NumPy: install it") from None


def averaged(shares: Shares, content: Content, begin: int, window: memoryview, other: memoryview) -> None:
    """Fill a window with sum(slices) / len(slices). The sum begins with 0 + the first slice, so -0.0 becomes 0.0."""
    shares.read(0, begin, window)
    total = _rounded(load(window, content.dtype) + 0, content.dtype)
    for number in range(1, len(content.slices)):
        shares.read(number, begin, other[: len(window)])
        total = _rounded(total + load(other[: len(window)], content.dtype), content.dtype)
    _store(total / total.dtype.type(len(content.slices)), window, content.dtype)


def as_float32(shares: Shares, content: Content, begin: int, window: memoryview, other: memoryview) -> None:
    """Fill a window with a model weight as float32."""
    size = ITEM_SIZE[content.dtype]
    target = np.frombuffer(window, np.float32)
    batch = len(other) // size
    for first in range(0, len(target), max(batch, 1)):  # a window without elements has no batch
        part = target[first : first + batch]
        found = other[: len(part) * size]
        shares.read(0, (begin // 4 + first) * size, found)
        part[:] = load(found, content.dtype)


def equal(one: memoryview, other: memoryview, dtype: str) -> bool:
    """Whether the elements are equal, even if bytes differ (0.0 and -0.0)."""
    return bool(np.array_equal(load(one, dtype), load(other, dtype)))


def load(data: memoryview, dtype: str) -> Any:
    """A NumPy array of the elements; bfloat16 as float32."""
    if dtype != "bfloat16":
        return np.frombuffer(data, np.dtype(dtype))
    return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _store(values: Any, data: memoryview, dtype: str) -> None:
    if dtype != "bfloat16":
        np.frombuffer(data, np.dtype(dtype))[:] = values
    else:
        np.frombuffer(data, np.uint16)[:] = _upper_halves(values)


def _rounded(values: Any, dtype: str) -> Any:
    """Round to bfloat16 after each operation, as torch does."""
    return (_upper_halves(values).astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else values


def _upper_halves(values: Any) -> Any:
    """Convert float32 to bfloat16, rounding to nearest even; a NaN stays a NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
