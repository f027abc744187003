"""CRC-32, the checksum of zip records. Uses ISA-L if it is installed, which is 20 times as fast as zlib."""

from collections.abc import Sequence
from functools import cache, lru_cache

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["combined", "crc32", "of_zeros", "shifted"]

# CRC-32 is linear: the checksum of data followed by zeros is a bit matrix times the checksum of the data.

Tables = tuple[tuple[int, ...], ...]  # by byte of a checksum and its value, the product


def combined(first: int, second: int, nbytes: int) -> int:
    """The checksum of two concatenated byte strings, from their checksums and the length of the second."""
    return shifted(first, nbytes) ^ second


def shifted(crc: int, nbytes: int) -> int:
    """What a byte string contributes to the checksum of a longer one, in which `nbytes` follow on it.

    The exclusive or of what all parts contribute, in any order, is the checksum.
    """
    exponent = 0
    while nbytes:
        if nbytes & 1:
            crc = _product(_zeros(exponent), crc)
        nbytes >>= 1
        exponent += 1
    return crc


@lru_cache
def of_zeros(nbytes: int) -> int:
    """The checksum of `nbytes` zero bytes."""
    return shifted(0xFFFFFFFF, nbytes) ^ 0xFFFFFFFF


def _product(tables: Tables, crc: int) -> int:
    first, second, third, fourth = tables
    return first[crc & 0xFF] ^ second[crc >> 8 & 0xFF] ^ third[crc >> 16 & 0xFF] ^ fourth[crc >> 24]


@cache
def _zeros(exponent: int) -> Tables:
    """The matrix of 2**exponent zero bytes."""
    if not exponent:
        # zlib inverts input and output. This undoes both, because only the map without them is linear.
        return _tables([crc32(b"\0", 1 << bit ^ 0xFFFFFFFF) ^ 0xFFFFFFFF for bit in range(32)])
    half = _zeros(exponent - 1)
    return _tables([_product(half, _product(half, 1 << bit)) for bit in range(32)])


def _tables(columns: Sequence[int]) -> Tables:
    found = []
    for byte in range(4):
        table = [0]
        for column in columns[8 * byte : 8 * byte + 8]:
            table += [column ^ known for known in table]
        found.append(tuple(table))
    return tuple(found)
