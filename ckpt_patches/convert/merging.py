"""The bytes of a parameter, merged from the slices of the ranks in blocks of bounded size."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ckpt_patches.convert.conversion_plan import AVERAGED, Content
from ckpt_patches.convert.layout import Block
from ckpt_patches.convert.reading import BLOCK, Elements
from ckpt_patches.errors import UserError
from ckpt_patches.formats.dtypes import ITEM_SIZE
from ckpt_patches.formats.elements import half_as_float32
from ckpt_patches.formats.ranged import RangedFiles

SHORT = 65536  # bytes; rows up to this length are read in batches, longer ones directly to their targets


class Merger:
    """Merges contents in blocks of at most `block` bytes, with memory of four times as much."""

    def __init__(self, files: RangedFiles, block: int = BLOCK) -> None:
        self.files = files
        # For the result, for other copies or the result before its conversion, and for rows.
        self._window, self._other, self._rows = (memoryview(bytearray(n * block)) for n in (1, 2, 1))

    def blocks(self, content: Content, name: str) -> Iterator[memoryview]:
        """Yield the bytes of a storage, block by block in one buffer. `name` is for errors.

        Raises:
            UserError: copies that must be equal differ.
            OSError: a file cannot be read.
        """
        copies = [[Elements(self.files, extents()) for extents in copy] for copy in content.copies]
        size, of_result = ITEM_SIZE[content.dtype], ITEM_SIZE[content.result_dtype]
        step = len(self._window) // max(size, of_result)  # elements
        for begin in range(0, content.numel, step):
            numel = min(step, content.numel - begin)
            window = self._window[: numel * size]
            self._merge(copies, content, begin * size, window, name)
            if content.dtype != content.result_dtype:
                converted = self._other[: numel * of_result]
                _store(_load(window, content.dtype), converted, content.result_dtype)
                window = converted
            yield window

    def _merge(self, copies: list[list[Elements]], content: Content, begin: int, window: memoryview, name: str) -> None:
        self._place(copies[0], content, begin, window)
        if content.how == AVERAGED:  # as torch: the sum begins with 0 + the first slice, so -0.0 becomes 0.0
            total = _rounded(_load(window, content.dtype) + 0, content.dtype)
        for copy in copies[1:]:
            other = self._other[: len(window)]
            self._place(copy, content, begin, other)
            if content.how == AVERAGED:
                total = _rounded(total + _load(other, content.dtype), content.dtype)
            elif not _is_same(window, other, content.dtype):
                files = " and ".join(sorted({own.file for own in (copies[0][0], copy[0])}))
                raise UserError(
                    f"{name}: expected the same values in {files}, which both hold this parameter, found others; a "
                    "universal checkpoint has one of it: resume on the same ranks"
                )
        if content.how == AVERAGED:
            _store(total / total.dtype.type(len(copies)), window, content.dtype)

    def _place(self, slices: list[Elements], content: Content, begin: int, window: memoryview) -> None:
        """Fill a window of the full parameter, from byte `begin` on, from its slices."""
        size = ITEM_SIZE[content.dtype]
        for block in content.layout.blocks:
            rows, own = _rows(block, size, begin, begin + len(window)), slices[block.slice]
            if block.count > 1 and block.source_stride == block.length <= SHORT // size:
                self._place_short(own, list(rows), begin, window)
            else:
                for source, target, nbytes in rows:
                    own.read(source, window[target - begin : target - begin + nbytes])

    def _place_short(self, own: Elements, rows: list[tuple[int, int, int]], begin: int, window: memoryview) -> None:
        """Read rows that are consecutive in the slice at once, then copy each to its target."""
        if not rows:
            return
        first = rows[0][0]
        read = self._rows[: rows[-1][0] + rows[-1][2] - first]  # all of them are in one window
        own.read(first, read)
        for source, target, nbytes in rows:
            window[target - begin : target - begin + nbytes] = read[source - first : source - first + nbytes]


def _rows(block: Block, size: int, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The parts of rows between the bytes `begin` and `end` of the target: source, target, length in bytes."""
    stride = block.target_stride * size
    for row in range(max(0, (begin - block.target * size) // stride), block.count):
        target = block.target * size + row * stride
        if target >= end:
            return
        low, high = max(target, begin), min(target + block.length * size, end)
        if low < high:
            yield (block.source + row * block.source_stride) * size + low - target, low, high - low


# Elements that are computed, bit for bit as torch computes them; a bfloat16 is the upper half of a float32.
# torch, whose import takes a second, is never imported.


def _is_same(one: memoryview, other: memoryview, dtype: str) -> bool:
    """Whether elements are equal, even if bytes differ (0.0 and -0.0). Comparing bytes is faster than views."""
    return bytes(one) == bytes(other) or bool(np.array_equal(_load(one, dtype), _load(other, dtype)))


def _load(data: memoryview, dtype: str) -> Any:
    """A NumPy array of the elements; bfloat16 as float32."""
    if dtype != "bfloat16":
        return np.frombuffer(data, np.dtype(dtype))
    return half_as_float32(np.frombuffer(data, np.uint8), dtype)


def _store(values: Any, data: memoryview, dtype: str) -> None:
    is_16 = dtype == "bfloat16"
    np.frombuffer(data, np.uint16 if is_16 else np.dtype(dtype))[:] = _upper_halves(values) if is_16 else values


def _rounded(values: Any, dtype: str) -> Any:
    """Round to bfloat16 after each operation, as torch does."""
    return (_upper_halves(values).astype("uint32") << 16).view("float32") if dtype == "bfloat16" else values


def _upper_halves(values: Any) -> Any:
    """Convert float32 to bfloat16, rounding to nearest even; a NaN stays a NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
