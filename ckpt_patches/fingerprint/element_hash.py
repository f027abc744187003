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
"""

import functools

import numpy as np
import numpy.typing as npt

ROW = 1 << 11  # elements
BLOCK = 256  # rows that are hashed together, 2 MiB: a fifth faster than 64, whose calls take longer than their work
MODULUS = 1 << 64
HALF = np.uint64(32)  # bits of half a word


def scrambled(state: int) -> int:
    """The SplitMix64 output for a 64-bit state."""
    z = (state + 0x9E3779B97F4A7C15) % MODULUS
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % MODULUS
    return z ^ (z >> 31)


def mix(index: int, bits: int) -> int:
    """The contribution of one element by the formula; a reference for the faster versions."""
    row, column = divmod(index, ROW)
    factor = (scrambled(2 * row + 1) | 1) * (scrambled(column & ~1) | 1) * ((1 << 32) + 1 if column % 2 else 1)
    return factor * (bits + 1) % MODULUS


def _scrambled(states: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`scrambled` for an array of states."""
    z = states + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@functools.cache
def _words() -> npt.NDArray[np.uint64]:
    """The factors of even columns, that is of words of two elements."""
    return _scrambled(np.arange(0, ROW, 2, dtype=np.uint64)) | np.uint64(1)


@functools.cache
def _columns() -> npt.NDArray[np.uint64]:
    """The factors of all columns."""
    return np.outer(_words(), np.array([1, (1 << 32) + 1], np.uint64)).ravel()


def _factors_of_rows(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """The factors of these rows."""
    return _scrambled(2 * rows.astype(np.uint64) + np.uint64(1)) | np.uint64(1)


def of_run(bits: npt.NDArray[np.uint32], begin: int) -> int:
    """The fingerprint sum over contiguous elements.

    Args:
        bits: the elements as 32-bit floats, in one dimension.
        begin: the place of the first element in the full flattened tensor.
    """
    found, at = 0, 0
    while at < len(bits):
        row, column = divmod(begin + at, ROW)
        whole = (len(bits) - at) // ROW
        if column == 0 and whole:
            found += _of_rows(bits[at : at + whole * ROW].reshape(whole, ROW), row)
            at += whole * ROW
        else:
            part = bits[at : at + ROW - column]
            found += _of_part(part, column) * int(_factors_of_rows(np.array([row]))[0])
            at += len(part)
    return found % MODULUS


def of_places(bits: npt.NDArray[np.uint32], places: npt.NDArray[np.int64]) -> int:
    """The sum over elements at any places of the tensor; slower than `of_run`, which needs contiguous elements."""
    rows, columns = np.divmod(places, ROW)
    factors = _columns()[columns] * _factors_of_rows(rows)
    return int((factors * (bits.astype(np.uint64) + np.uint64(1))).sum(dtype=np.uint64))


def zeros(numel: int) -> int:
    """The fingerprint of a tensor of `numel` zeros."""
    rows, rest = divmod(numel, ROW)
    factors = _factors_of_rows(np.arange(rows + 1))
    of_rows = _sums_of_columns()[ROW] * int(factors[:rows].sum(dtype=np.uint64))
    return (of_rows + _sums_of_columns()[rest] * int(factors[rows])) % MODULUS


@functools.cache
def _sums_of_columns() -> list[int]:
    """The prefix sums of the column factors: the share of the 1 that the formula adds to all bits."""
    return [0, *np.cumsum(_columns(), dtype=np.uint64).tolist()]


def _of_part(bits: npt.NDArray[np.uint32], column: int) -> int:
    """The sum over a part of one row, without the row's factor."""
    end, sums = column + len(bits), _sums_of_columns()
    return int((_columns()[column:end] * bits).sum(dtype=np.uint64)) + sums[end] - sums[column]


def _of_rows(bits: npt.NDArray[np.uint32], first: int) -> int:
    """The sum over full rows.

    Two elements are one 64-bit word, low + 2^32 high. Adding the high half gives low + (2^32 + 1) high, which includes
    the extra factor of the odd element: each word is multiplied only once.
    """
    factors = _factors_of_rows(np.arange(first, first + len(bits)))
    ones = _sums_of_columns()[ROW] * int(factors.sum(dtype=np.uint64))
    return int((sums_of_rows(bits) * factors).sum(dtype=np.uint64)) + ones


def sums_of_rows(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """The sum over the words of each row, modulo 2^64.

    Args:
        bits: 32-bit floats, [rows, ROW], contiguous, at any memory alignment.
    """
    mixed = np.empty((min(BLOCK, len(bits)), ROW // 2), np.uint64)
    of_rows = np.empty(len(bits), np.uint64)
    for begin in range(0, len(bits), BLOCK):
        words = _aligned(bits[begin : begin + BLOCK]).view("<u8")
        added = np.right_shift(words, HALF, out=mixed[: len(words)])
        np.add(added, words, out=added)
        np.einsum("ij,j->i", added, _words(), out=of_rows[begin : begin + BLOCK])
    return of_rows


def _aligned(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    return bits.copy() if bits.ctypes.data % 8 else bits
