"""The fingerprint of a tensor: a sum over its elements, modulo 2^64, of what an element's place and bits are mixed to.

    fingerprint(x) = sum over i of mix(i, bits(x_i))                        modulo 2^64
    mix(i, b)      = row(i div 2048) * column(i mod 2048) * (b + 1)
    row(r)         = scrambled(2 r + 1) | 1
    column(c)      = scrambled(c) | 1             of an even c
                   = column(c - 1) * (2^32 + 1)   of an odd one

`i` is an element's place in the whole flattened tensor, `b` its bits as a 32-bit float, `scrambled` the SplitMix64 of
a state (Steele, Lea, Flood, OOPSLA 2014). A sum has no order, so that parts of a tensor, however it is divided, add up.
As a zero is mixed like any other value, an element that is counted twice, or not at all, changes the sum as well.

Every factor of an element's bits is odd: another bit in one element is another sum, always. Two elements change places
unseen if 64 bits of the difference of their factors and values vanish, by chance once in 2^32 for two given places;
the two of a word, elements 2 j and 2 j + 1, never.
"""

import functools

import numpy as np
import numpy.typing as npt

ROW = 1 << 11  # elements
BLOCK = 64  # rows that are mixed together: what fits into a core's own memory
MODULUS = 1 << 64
HALF = np.uint64(32)  # bits of a word


def scrambled(state: int) -> int:
    """SplitMix64: what it gives for a state of 64 bits."""
    z = (state + 0x9E3779B97F4A7C15) % MODULUS
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % MODULUS
    return z ^ (z >> 31)


def mix(index: int, bits: int) -> int:
    """What one element adds: that of the formula, to hold others against."""
    row, column = divmod(index, ROW)
    factor = (scrambled(2 * row + 1) | 1) * (scrambled(column & ~1) | 1) * ((1 << 32) + 1 if column % 2 else 1)
    return factor * (bits + 1) % MODULUS


def _scrambled(states: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The same as `scrambled`, of many."""
    z = states + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@functools.cache
def _words() -> npt.NDArray[np.uint64]:
    """The factors of even columns: of the words that two elements are."""
    return _scrambled(np.arange(0, ROW, 2, np.uint64)) | np.uint64(1)


@functools.cache
def _columns() -> npt.NDArray[np.uint64]:
    """The factors of all columns."""
    return np.outer(_words(), np.array([1, (1 << 32) + 1], np.uint64)).ravel()


def _factors_of_rows(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Their factors."""
    return _scrambled(2 * rows.astype(np.uint64) + np.uint64(1)) | np.uint64(1)


def of_run(bits: npt.NDArray[np.uint32], begin: int) -> int:
    """What neighbouring elements add.

    Args:
        bits: of their 32-bit floats, in one dimension.
        begin: the place of the first of them in the whole flattened tensor.
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
    """What elements anywhere in the tensor add; slower than `of_run`, and for elements that are no neighbours."""
    rows, columns = np.divmod(places, ROW)
    factors = _columns()[columns] * _factors_of_rows(rows)
    return int((factors * (bits.astype(np.uint64) + np.uint64(1))).sum(dtype=np.uint64))


def zeros(numel: int) -> int:
    """The fingerprint of so many zeros."""
    rows, rest = divmod(numel, ROW)
    factors = _factors_of_rows(np.arange(rows + 1))
    of_rows = _sums_of_columns()[ROW] * int(factors[:rows].sum(dtype=np.uint64))
    return (of_rows + _sums_of_columns()[rest] * int(factors[rows])) % MODULUS


@functools.cache
def _sums_of_columns() -> list[int]:
    """Of those before each column: what zeros and the ones that are added to all bits come to."""
    return [0, *np.cumsum(_columns(), dtype=np.uint64).tolist()]


def _of_part(bits: npt.NDArray[np.uint32], column: int) -> int:
    """What a part of one row adds, but for the factor of its row."""
    end, sums = column + len(bits), _sums_of_columns()
    return int((_columns()[column:end] * bits).sum(dtype=np.uint64)) + sums[end] - sums[column]


def _of_rows(bits: npt.NDArray[np.uint32], first: int) -> int:
    """What whole rows add.

    Two elements are one word of 64 bits, low + 2^32 high. With its high half added the word is what both elements are
    with the odd one's other factor, low + (2^32 + 1) high: each word is multiplied once.
    """
    factors = _factors_of_rows(np.arange(first, first + len(bits)))
    ones = _sums_of_columns()[ROW] * int(factors.sum(dtype=np.uint64))
    return int((sums_of_rows(bits) * factors).sum(dtype=np.uint64)) + ones


def sums_of_rows(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """What the words of each row come to, modulo 2^64.

    Args:
        bits: of 32-bit floats, [rows, ROW], without gaps; they may begin anywhere in memory.
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
