"""The few parameters that are computed and not only moved, with NumPy, to the last bit as torch computes them.

NumPy is imported for these alone, and torch, which takes a second, for none. A bfloat16, which NumPy has not, is the
upper half of a float32.
"""

from typing import Any

from ckpt_patches.convert.output_files import Content
from ckpt_patches.convert.sources import Sources
from ckpt_patches.errors import UserError
from ckpt_patches.formats.dtypes import ITEM_SIZE

try:
    import numpy as np
except ImportError:
    raise UserError("averaged parameters and weights that are converted to float32 need NumPy: install it") from None


def averaged(sources: Sources, content: Content, begin: int, window: memoryview, other: memoryview) -> None:
    """sum(slices) / len(slices), which begins with 0 + the first: of -0.0 that makes 0.0."""
    sources.read_slice(content.slices[0], begin, window)
    total = _rounded(load(window, content.dtype) + 0, content.dtype)
    for slice_ in content.slices[1:]:
        sources.read_slice(slice_, begin, other[: len(window)])
        total = _rounded(total + load(other[: len(window)], content.dtype), content.dtype)
    _store(total / total.dtype.type(len(content.slices)), window, content.dtype)


def as_float32(sources: Sources, content: Content, begin: int, window: memoryview, other: memoryview) -> None:
    """A weight of the model in fp32."""
    size = ITEM_SIZE[content.dtype]
    target = np.frombuffer(window, np.float32)
    batch = len(other) // size
    for first in range(0, len(target), batch):
        part = target[first : first + batch]
        found = other[: len(part) * size]
        sources.read_slice(content.slices[0], (begin // 4 + first) * size, found)
        part[:] = load(found, content.dtype)


def equal(one: memoryview, other: memoryview, dtype: str) -> bool:
    """Whether the elements are equal where not all bytes are: 0.0 and -0.0."""
    return bool(np.array_equal(load(one, dtype), load(other, dtype)))


def load(data: memoryview, dtype: str) -> Any:
    """Elements as NumPy has them; bfloat16 as float32."""
    if dtype != "bfloat16":
        return np.frombuffer(data, np.dtype(dtype))
    return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _store(values: Any, data: memoryview, dtype: str) -> None:
    if dtype != "bfloat16":
        np.frombuffer(data, np.dtype(dtype))[:] = values
    else:
        np.frombuffer(data, np.uint16)[:] = _upper_halves(values)


def _rounded(values: Any, dtype: str) -> Any:
    """After each operation, as torch does."""
    return (_upper_halves(values).astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else values


def _upper_halves(values: Any) -> Any:
    """float32 to bfloat16: to the nearest, and of two to the even one; a NaN stays one."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
