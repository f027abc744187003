"""The bytes of a parameter, merged from the slices of the ranks in blocks of bounded size."""

from collections.abc import Iterator
from typing import Any

from ckpt_patches.convert.conversion_plan import AVERAGED, FLOAT32, Content
from ckpt_patches.convert.layout import Block
from ckpt_patches.convert.reading import Elements, Reader
from ckpt_patches.errors import UserError
from ckpt_patches.formats.dtypes import ITEM_SIZE

SHORT = 65536  # bytes; rows up to this length are read in batches, longer ones directly to their targets


class Merger:
    """Merges contents in blocks of at most `block` bytes, with memory of four times as much."""

    def __init__(self, reader: Reader, block: int) -> None:
        self._reader = reader
        # For the result, for other copies or for elements before their conversion, and for rows.
        self._window, self._other, self._rows = (memoryview(bytearray(n * block)) for n in (1, 2, 1))

    def blocks(self, content: Content, name: str) -> Iterator[memoryview]:
        """Yield the bytes of a storage, block by block in one buffer. `name` is for errors.

        Raises:
            UserError: copies that must be equal differ, or a file cannot be read.
        """
        copies = [[Elements(self._reader, extents()) for extents in copy] for copy in content.copies]
        for begin in range(0, content.nbytes, len(self._window)):
            window = self._window[: content.nbytes - begin]
            if content.how == FLOAT32:
                size, read = ITEM_SIZE[content.dtype], self._other[: len(window) // 4 * ITEM_SIZE[content.dtype]]
                copies[0][0].read(begin // 4 * size, read)
                _store(_load(read, content.dtype).astype("float32"), window, "float32")
            else:
                self._merge(copies, content, begin, window, name)
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
        for block in (block.scaled(ITEM_SIZE[content.dtype]) for block in content.layout.blocks):
            rows, own = _rows(block, begin, begin + len(window)), slices[block.slice]
            if block.count > 1 and block.source_stride == block.length <= SHORT:
                self._place_short(own, rows, begin, window)
            else:
                for source, target, nbytes in rows:
                    own.read(source, window[target - begin : target - begin + nbytes])

    def _place_short(self, own: Elements, rows: Iterator[tuple[int, int, int]], begin: int, window: memoryview) -> None:
        """Read rows that are consecutive in the slice at once, then copy each to its target."""
        parts = list(rows)
        if not parts:
            return
        first = parts[0][0]
        read = self._rows[: parts[-1][0] + parts[-1][2] - first]  # all of them are in one window
        own.read(first, read)
        for source, target, nbytes in parts:
            window[target - begin : target - begin + nbytes] = read[source - first : source - first + nbytes]


def _rows(block: Block, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The parts of a block's rows between `begin` and `end` of the target: source, target, length in bytes."""
    for row in range(max(0, (begin - block.target) // block.target_stride), block.count):
        target = block.target + row * block.target_stride
        if target >= end:
            return
        low, high = max(target, begin), min(target + block.length, end)
        if low < high:
            yield block.source + row * block.source_stride + low - target, low, high - low


# Elements that are computed, bit for bit as torch computes them; a bfloat16 is the upper half of a float32


def _numpy() -> Any:
    """NumPy, whose import is needed only here; torch, whose import takes a second, never is."""
    try:
        import numpy
    except ImportError:
        raise UserError(
            "averaged parameters and weights that are converted to float32 need NumPy: install it"
        ) from None
    return numpy


def _is_same(one: memoryview, other: memoryview, dtype: str) -> bool:
    """Whether elements are equal, even if bytes differ (0.0 and -0.0). Comparing bytes is faster than views."""
    return bytes(one) == bytes(other) or bool(_numpy().array_equal(_load(one, dtype), _load(other, dtype)))


def _load(data: memoryview, dtype: str) -> Any:
    """A NumPy array of the elements; bfloat16 as float32."""
    np = _numpy()
    if dtype != "bfloat16":
        return np.frombuffer(data, np.dtype(dtype))
    from ckpt_patches.formats.elements import half_as_float32  # imports NumPy

    return half_as_float32(np.frombuffer(data, np.uint8), dtype)


def _store(values: Any, data: memoryview, dtype: str) -> None:
    np = _numpy()
    if dtype != "bfloat16":
        np.frombuffer(data, np.dtype(dtype))[:] = values
    else:
        np.frombuffer(data, np.uint16)[:] = _upper_halves(values)


def _rounded(values: Any, dtype: str) -> Any:
    """Round to bfloat16 after each operation, as torch does."""
    return (_upper_halves(values).astype("uint32") << 16).view("float32") if dtype == "bfloat16" else values


def _upper_halves(values: Any) -> Any:
    """Convert float32 to bfloat16, rounding to nearest even; a NaN stays a NaN."""
    np = _numpy()
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
