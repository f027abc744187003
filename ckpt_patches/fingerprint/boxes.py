"""Fingerprints of parts of a tensor that are boxes in it, as tensor-parallel ranks and chunks of files are."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ckpt_patches.fingerprint import element_hash
from ckpt_patches.fingerprint.element_hash import MODULUS

if TYPE_CHECKING:
    import torch

    Elements = TypeVar("Elements", npt.NDArray[np.int64], torch.Tensor)

LONG = 1024  # elements: a row of so many is summed by itself, shorter ones together
TOGETHER = 1 << 19  # elements of short rows, for each of which its place is calculated


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

    def element(self, place: int) -> int | None:
        """Which element of the box is at a place of the whole flattened tensor; None where none is."""
        found, stride = 0, 1
        for size, offset, whole in zip(reversed(self.size), reversed(self.offsets), reversed(self.shape), strict=True):
            place, index = divmod(place, whole)
            if not offset <= index < offset + size:
                return None
            found += (index - offset) * stride
            stride *= size
        return None if place else found

    def place(self, element: int) -> int:
        """Where an element of the box is in the whole flattened tensor."""
        (found,) = places(np.array([element]), self).tolist()
        return int(found)


def of_box(bits: npt.NDArray[np.uint32], first: int, box: Box) -> int:
    """What elements of a box add, in C order of the box from its element `first` on.

    Args:
        bits: of their 32-bit floats, in one dimension.
        first: in the box.
        box: whose first element is `box.offsets` in the whole tensor.
    """
    return of_runs(
        len(bits),
        first,
        box,
        lambda at, end, place: element_hash.of_run(bits[at:end], place),
        lambda at, end: element_hash.of_places(bits[at:end], places(np.arange(first + at, first + end), box)),
    )


def of_runs(
    numel: int,
    first: int,
    box: Box,
    of_run: Callable[[int, int, int], int],
    of_short: Callable[[int, int], int],
) -> int:
    """What elements of a box add, from its element `first` on, wherever they lie.

    Args:
        numel: how many.
        first: in the box.
        box: that they are of.
        of_run: what those from one to another (counted from `first`) add, which are neighbours from a place on.
        of_short: what those from one to another add, which are not.
    """
    row, found, at = box.row, 0, 0
    while at < numel:
        if row < LONG:
            end = min(at + TOGETHER, numel)
            found += of_short(at, end)
        else:
            end = min(at + row - (first + at) % row, numel)
            found += of_run(at, end, box.place(first + at))
        at = end
    return found % MODULUS


def places(elements: "Elements", box: Box) -> "Elements":
    """Where elements of a box (numbers in it) are in the whole flattened tensor."""
    found = elements * 0
    stride = 1
    for size, offset, whole in zip(reversed(box.size), reversed(box.offsets), reversed(box.shape), strict=True):
        found = found + (elements % size + offset) * stride
        elements = elements // size
        stride *= whole
    return found
