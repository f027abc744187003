"""The sums of `element_hash` for tensors on a GPU: only the result is copied to the CPU.

torch has no arithmetic for unsigned 64-bit words; signed words wrap around in the same way.
"""

import functools

import torch

from ckpt_patches.fingerprint.boxes import Box, of_runs, places
from ckpt_patches.fingerprint.element_hash import MODULUS, ROW

BLOCK = 1 << 11  # rows that are hashed together: 16 MiB of words, and two results of that size
LOW_HALF = (1 << 32) - 1


def of_box(bits: torch.Tensor, first: int, box: Box) -> int:
    """The sum over elements of a box, in C order of the box from its element `first` on; `bits` is int32."""

    def of_short(at: int, end: int) -> int:
        return of_places(bits[at:end], places(torch.arange(first + at, first + end, device=bits.device), box))

    return of_runs(len(bits), first, box, lambda at, end, place: of_run(bits[at:end], place), of_short)


def of_run(bits: torch.Tensor, begin: int) -> int:
    """The sum over contiguous elements: `bits` (int32, one dimension) from the place `begin` on."""
    found, at = 0, 0
    while at < len(bits):
        row, column = divmod(begin + at, ROW)
        whole = min((len(bits) - at) // ROW, BLOCK)
        if column == 0 and whole:
            found += _of_rows(bits[at : at + whole * ROW], row)
            at += whole * ROW
        else:
            part = bits[at : at + ROW - column]
            places = torch.arange(begin + at, begin + at + len(part), device=bits.device)
            found += of_places(part, places)
            at += len(part)
    return found % MODULUS


def of_places(bits: torch.Tensor, places: torch.Tensor) -> int:
    """The sum over elements at any places of the tensor: `bits` (int32) and `places` (int64) of equal size."""
    factors = _columns(bits.device)[places % ROW] * _factors_of_rows(places // ROW)
    return int((factors * ((bits.to(torch.int64) & LOW_HALF) + 1)).sum()) % MODULUS


def _of_rows(bits: torch.Tensor, first: int) -> int:
    rows = len(bits) // ROW
    factors = _factors_of_rows(torch.arange(first, first + rows, device=bits.device))
    if bits.storage_offset() % 2 or bits.data_ptr() % 8:
        bits = bits.clone()
    words = bits.view(torch.int64).view(rows, ROW // 2)
    mixed = words >> 32
    mixed &= LOW_HALF  # the shift of signed words copies the sign bit
    mixed += words
    mixed *= _columns(bits.device)[::2]
    ones = _columns(bits.device).sum()
    return int(((mixed.sum(dim=1) + ones) * factors).sum()) % MODULUS


@functools.cache
def _columns(device: torch.device) -> torch.Tensor:
    """The factors of all columns (int64)."""
    even = _scrambled(torch.arange(0, ROW, 2, device=device)) | 1
    return torch.stack((even, even * ((1 << 32) + 1)), dim=1).view(-1)


def _factors_of_rows(rows: torch.Tensor) -> torch.Tensor:
    return _scrambled(2 * rows + 1) | 1


def _scrambled(states: torch.Tensor) -> torch.Tensor:
    """SplitMix64, as in `element_hash`."""
    z = states + _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """A logical right shift, without sign extension."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    return word - MODULUS if word >= MODULUS // 2 else word
