"""Fingerprints of parts of a tensor that are boxes in it, as tensor-parallel ranks and chunks of files are."""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_patches.fingerprint.mix import MODULUS, of_places, of_run

LONG = 1024  # elements: a row of so many is summed by itself, shorter ones together


class Box(NamedTuple):
    """Where a part lies in a tensor: its first element, and its size, on every axis."""

    offsets: tuple[int, ...]
    size: tuple[int, ...]
    shape: tuple[int, ...]  # of the whole tensor

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def row(self) -> int:
        """Elements that are neighbours in the whole tensor as well: of the last axis on which the part is not all."""
        axis = len(self.shape)
        while axis and self.size[axis - 1] == self.shape[axis - 1]:
            axis -= 1
        return math.prod(self.size[max(axis - 1, 0) :])


def of_box(bits: npt.NDArray[np.uint32], first: int, box: Box) -> int:
    """What elements of a box add, in C order of the box from its element `first` on.

    Args:
        bits: of their 32-bit floats, in one dimension.
        first: in the box.
        box: whose first element is `box.offsets` in the whole tensor.
    """
    row, found, at = box.row, 0, 0
    if len(bits) and row < LONG:
        return of_places(bits, _places(np.arange(first, first + len(bits)), box))
    while at < len(bits):
        part = bits[at : at + row - (first + at) % row]
        (place,) = _places(np.array([first + at]), box).tolist()
        found += of_run(part, place)
        at += len(part)
    return found % MODULUS


def _places(elements: npt.NDArray[np.int64], box: Box) -> npt.NDArray[np.int64]:
    """Where elements of a box are in the whole flattened tensor."""
    places = np.zeros(len(elements), np.int64)
    stride = 1
    for size, offset, whole in zip(reversed(box.size), reversed(box.offsets), reversed(box.shape), strict=True):
        elements, index = np.divmod(elements, size)
        places += (index + offset) * stride
        stride *= whole
    return places
