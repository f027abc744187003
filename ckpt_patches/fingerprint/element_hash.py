"""The fingerprint of a tensor: the sum of a hash of each element's place and bits, modulo 2^64.

    fingerprint(x) = sum over i of mix(i, bits(x_i))                        modulo 2^64
    mix(i, b)      = row(i div 2048) * column(i mod 2048) * (b + 1)
    row(r)         = scrambled(2 r + 1) | 1
    column(c)      = scrambled(c) | 1             for even c
                   = column(c - 1) * (2^32 + 1)   for odd c

`i` is an element's place in the full flattened tensor, `b` its bits as a 32-bit float, `scrambled` the SplitMix64 of
a state (Steele, Lea, Flood, OOPSLA 2014). Sums are independent of order, so the parts of any division of a tensor add
up. Zeros are hashed like any other value, so an element that is counted twice, or not at all, changes the sum as well.

Every factor of an element's bits is odd, so a change in one element always changes the sum. A swap of two elements is
undetected if the product of the differences of their factors and values is 0 modulo 2^64: by chance once in 2^32 for
two given places; never for the two elements of a word, 2 j and 2 j + 1.

The same code computes with arrays of NumPy and with tensors of torch on a GPU. torch has no arithmetic for unsigned
64-bit words; signed ones wrap around in the same way.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np

Array = Any  # of NumPy, or a tensor of torch
ROW = 1 << 11  # elements
MODULUS = 1 << 64
LOW_HALF = (1 << 32) - 1
TOGETHER = 1 << 8  # rows that NumPy hashes together: 2 MiB of words, which a processor's cache holds
ON_DEVICE = 1 << 11  # the same of torch
LONG = 1024  # elements: rows of a box of this length are summed one by one, shorter ones together
SHORT_ROWS = 1 << 19  # elements of short rows that are summed together


class Box(NamedTuple):
    """A part's position in a tensor: its first element and size on every axis."""

    offsets: tuple[int, ...]
    size: tuple[int, ...]
    shape: tuple[int, ...]  # of the full tensor

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def row(self) -> int:
        """The number of elements that are contiguous in the full tensor: a row of the last axis that is cut."""
        axis = len(self.shape)
        while axis and self.size[axis - 1] == self.shape[axis - 1]:
            axis -= 1
        return math.prod(self.size[max(axis - 1, 0) :])


def all_of(shape: tuple[int, ...]) -> Box:
    """The box of a complete tensor."""
    return Box((0,) * len(shape), shape, shape)


def of_box(bits: Array, first: int, box: Box) -> int:
    """The fingerprint sum over elements of a box, in C order of the box from its element `first` on.

    Args:
        bits: the elements as 32-bit floats, in one dimension: uint32 of NumPy, int32 of torch.
        first: index in the box of the first element.
        box: its first element is at `box.offsets` in the full tensor.
    """
    row, found, at = box.row, 0, 0
    while at < len(bits):
        if row < LONG:
            end = min(at + SHORT_ROWS, len(bits))
            found += of_places(bits[at:end], _places(_range(bits, first + at, first + end), box))
        else:
            end = min(at + row - (first + at) % row, len(bits))
            found += of_run(bits[at:end], int(_places(np.array([first + at]), box)[0]))
        at = end
    return found % MODULUS


def _places(elements: Array, box: Box) -> Array:
    """The places in the full flattened tensor of elements, given their indices in the box."""
    found, stride = elements * 0, 1
    for size, offset, whole in zip(reversed(box.size), reversed(box.offsets), reversed(box.shape), strict=True):
        found = found + (elements % size + offset) * stride
        elements = elements // size
        stride *= whole
    return found


def of_run(bits: Array, begin: int) -> int:
    """The fingerprint sum over contiguous elements, of which the first is at the place `begin`."""
    found, at = 0, 0
    together = TOGETHER if isinstance(bits, np.ndarray) else ON_DEVICE
    while at < len(bits):
        row, column = divmod(begin + at, ROW)
        rows = min((len(bits) - at) // ROW, together)
        if column == 0 and rows:
            found += _of_rows(bits[at : at + rows * ROW], row, rows)
            at += rows * ROW
        else:
            part = bits[at : at + ROW - column]
            found += of_places(part, _range(bits, begin + at, begin + at + len(part)))
            at += len(part)
    return found % MODULUS


def of_places(bits: Array, places: Array) -> int:
    """The sum over elements at any places of the tensor (int64); slower than `of_run`."""
    words = bits.astype(np.int64) if isinstance(bits, np.ndarray) else bits.long() & LOW_HALF
    factors = _columns(_device(bits))[places % ROW] * _factors_of_rows(places // ROW)
    return int((factors * (words + 1)).sum()) % MODULUS


def _of_rows(bits: Array, first: int, rows: int) -> int:
    """The sum over full rows.

    Two elements are one 64-bit word, low + 2^32 high. Adding the high half gives low + (2^32 + 1) high, which includes
    the extra factor of the odd element: each word is multiplied only once.
    """
    words, even = _words(bits).reshape(rows, ROW // 2), _even(_device(bits))
    mixed = words >> 32
    if isinstance(bits, np.ndarray):
        mixed += words
        of_rows = np.einsum("ij,j->i", mixed, even.view(np.uint64)).view(np.int64)
    else:
        mixed &= LOW_HALF  # the shift of signed words copies the sign bit
        mixed += words
        of_rows = mixed.mul_(even).sum(1)
    ones = _columns(_device(bits)).sum()  # the share of the 1 that the formula adds to all bits
    return int(((of_rows + ones) * _factors_of_rows(_range(bits, first, first + rows))).sum()) % MODULUS


def zeros(numel: int) -> int:
    """The fingerprint of a tensor of `numel` zeros."""
    rows, rest = divmod(numel, ROW)
    factors, columns = _factors_of_rows(np.arange(rows + 1)), _columns(None)
    return (int(columns.sum()) * int(factors[:rows].sum()) + int(columns[:rest].sum()) * int(factors[rows])) % MODULUS


def _words(bits: Array) -> Array:
    """Pairs of elements as words of 64 bits; a copy where they are not aligned in memory."""
    if isinstance(bits, np.ndarray):
        return (bits.copy() if bits.ctypes.data % 8 else bits).view("<u8")
    import torch

    return (bits.clone() if bits.storage_offset() % 2 or bits.data_ptr() % 8 else bits).view(torch.int64)


def _device(bits: Array) -> Any:
    """Where factors for these elements are; None for NumPy."""
    return None if isinstance(bits, np.ndarray) else bits.device


def _range(bits: Array, begin: int, end: int) -> Array:
    if isinstance(bits, np.ndarray):
        return np.arange(begin, end)
    import torch

    return torch.arange(begin, end, device=bits.device)


@functools.cache
def _even(device: Any) -> Array:
    """The factors of even columns (int64), that is of words of two elements."""
    factors = _scrambled(np.arange(0, ROW, 2)) | 1
    if device is None:
        return factors
    import torch

    return torch.from_numpy(factors).to(device)


@functools.cache
def _columns(device: Any) -> Array:
    """The factors of all columns (int64)."""
    factors = _even(device).repeat(2) if device is None else _even(device).repeat_interleave(2)
    factors[1::2] *= (1 << 32) + 1
    return factors


def _factors_of_rows(rows: Array) -> Array:
    return _scrambled(2 * rows + 1) | 1


def _scrambled(states: Array) -> Array:
    """The SplitMix64 output for each 64-bit state."""
    z = states + _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(words: Array, by: int) -> Array:
    """A logical right shift, without sign extension."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    return word - MODULUS if word >= MODULUS // 2 else word
