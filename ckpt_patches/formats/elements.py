"""Read the elements of a stream in blocks, and decode them."""

import errno
import functools
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ckpt_patches.formats.checkpoint import Joined, Stream
from ckpt_patches.formats.checksum import crc32
from ckpt_patches.formats.dtypes import item_size
from ckpt_patches.formats.ranged import RangedFiles

BLOCK = 64 * 1024  # elements; a block of four arrays fits in the L2 cache
LARGEST_MAPPING = 24 << 20  # bytes; glibc's threshold follows those of up to 32 MiB
Block: TypeAlias = "npt.NDArray[np.generic]"
HALVES = ("bfloat16", "float16")
# Per 8-bit dtype: mantissa bits, exponent bias, the bits of infinity and NaN.
SMALL_FLOATS = {
    "float8_e4m3fn": (3, 7, (0x7F, 0xFF)),
    "float8_e4m3fnuz": (3, 8, (0x80,)),
    "float8_e5m2": (2, 15, (*range(0x7C, 0x80), *range(0xFC, 0x100))),
    "float8_e5m2fnuz": (2, 16, (0x80,)),
}
POWERS_OF_TWO = "float8_e8m0fnu"  # no sign bit; 0xFF is NaN
COMPLEX = {"complex128": np.float64, "complex64": np.float32, "complex32": np.float16}
OTHER_FLOATS = ("float64", *SMALL_FLOATS, POWERS_OF_TWO, *COMPLEX)


@functools.cache
def keep_freed_memory() -> None:
    """Have glibc keep what blocks free for the next ones: up to twice as many bytes as its largest freed mapping had.

    Otherwise each block returns it to the system, and the page faults take more time than all else.
    """
    np.empty(LARGEST_MAPPING, np.uint8)


class PartRead(NamedTuple):
    """A part of a file that was read, and its checksum."""

    path: str
    offset: int
    nbytes: int
    crc: int


class BlockReader:
    """Reads a stream block by block into one buffer; if `checked`, keeps the checksums of the bytes read."""

    def __init__(self, stream: Stream, most: int, files: RangedFiles, *, checked: bool) -> None:
        keep_freed_memory()
        self.stream, self.item_size, self.checked = stream, item_size(stream.dtype), checked
        self.files, self.joined = files, Joined(stream.extents)
        self.buffer = np.empty(most * self.item_size, np.uint8)
        self.pieces: list[PartRead] = []

    def read(self, begin: int, end: int) -> Block:
        """The bytes of elements `begin` to `end`, valid until the next call. Raises OSError if there are fewer."""
        first, last = begin * self.item_size, end * self.item_size
        if last > self.joined.nbytes:
            raise OSError(errno.EIO, f"expected {end} elements, found {self.stream.numel}", self.stream.array)
        rest = memoryview(self.buffer)
        for path, offset, nbytes in self.joined.part(first, last):
            self.files.read(path, offset, rest[:nbytes])
            if self.checked:
                self._check(path, offset, rest[:nbytes])
            rest = rest[nbytes:]
        return self.buffer[: last - first]

    def _check(self, path: str, offset: int, data: memoryview) -> None:
        last = self.pieces[-1] if self.pieces else None
        if last and last.path == path and last.offset + last.nbytes == offset:
            self.pieces[-1] = PartRead(path, last.offset, last.nbytes + len(data), crc32(data, last.crc))
        else:
            self.pieces.append(PartRead(path, offset, len(data), crc32(data)))


def read_elements(stream: Stream, begin: int, end: int) -> Block:
    """The bytes of elements `begin` to `end`."""
    with RangedFiles() as files:
        return BlockReader(stream, end - begin, files, checked=False).read(begin, end)


def read_values(stream: Stream, begin: int, end: int) -> "npt.NDArray[np.float32] | None":
    """The same elements in fp32; None if the dtype is not floating-point."""
    return as_float32(read_elements(stream, begin, end), stream.dtype)


def as_float32(data: Block, dtype: str) -> "npt.NDArray[np.float32] | None":
    """The elements in fp32; None if the dtype is not floating-point."""
    if dtype == "float32":
        return data.view(np.float32)
    if dtype in HALVES:
        return half_as_float32(data, dtype)
    if dtype == "float64":
        return _narrowed(data.view(np.float64))
    if dtype in SMALL_FLOATS or dtype == POWERS_OF_TWO:
        return _of_8_bits(dtype)[data.view(np.uint8)]
    if dtype in COMPLEX:
        return _odd_part(data.view(COMPLEX[dtype]).reshape(-1, 2))
    return None


@functools.cache
def _of_8_bits(dtype: str) -> "npt.NDArray[np.float32]":
    """The value of each byte."""
    bits = np.arange(256)
    if dtype == POWERS_OF_TWO:
        found = np.ldexp(1.0, bits - 127)
        found[255] = np.nan
        return found.astype(np.float32)
    digits, bias, odd = SMALL_FLOATS[dtype]
    exponent, fraction = (bits & 0x7F) >> digits, bits & ((1 << digits) - 1)
    significand = fraction + np.where(exponent > 0, 1 << digits, 0)
    found = np.ldexp(np.where(bits & 0x80, -1.0, 1.0) * significand, np.maximum(exponent, 1) - bias - digits)
    found[list(odd)] = np.nan  # infinity is not distinguished from NaN
    return found.astype(np.float32)


def _odd_part(pairs: "npt.NDArray[Any]") -> "npt.NDArray[np.float32]":
    """One part of each complex number: the real part if the imaginary part is finite, else the imaginary part."""
    return _narrowed(np.where(np.isfinite(pairs[:, 1]), pairs[:, 0], pairs[:, 1]))


def _narrowed(values: "npt.NDArray[Any]") -> "npt.NDArray[np.float32]":
    """Convert to fp32. Larger finite numbers become the largest fp32 number; infinity stays."""
    with np.errstate(over="ignore"):
        found = values.astype(np.float32)
    return np.where(np.isinf(found) & np.isfinite(values), np.copysign(np.finfo(np.float32).max, found), found)


def is_number(dtype: str) -> bool:
    """Whether the dtype is floating-point; integers are codes or counts."""
    return dtype == "float32" or dtype in HALVES or dtype in OTHER_FLOATS


def half_as_float32(data: Block, dtype: str) -> "npt.NDArray[np.float32]":
    if dtype == "float16":
        return data.view(np.float16).astype(np.float32)
    return (data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
