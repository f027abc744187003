"""Fingerprints of parts of a tensor that are boxes in it, such as tensor-parallel shards and chunks of files."""

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

LONG = 1024  # elements: rows of this length are summed one by one, shorter ones together
TOGETHER = 1 << 19  # elements of short rows per batch; the place of each is calculated


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

    def element(self, place: int) -> int | None:
        """The index in the box of the element at a place of the full flattened tensor; None if outside."""
        found, stride = 0, 1
        for size, offset, whole in zip(reversed(self.size), reversed(self.offsets), reversed(self.shape), strict=True):
            place, index = divmod(place, whole)
            if not offset <= index < offset + size:
                return None
            found += (index - offset) * stride
            stride *= size
        return None if place else found

    def place(self, element: int) -> int:
        """The place of an element of the box in the full flattened tensor."""
        (found,) = places(np.array([element]), self).tolist()
        return int(found)


def of_box(bits: npt.NDArray[np.uint32], first: int, box: Box) -> int:
    """The fingerprint sum over elements of a box, in C order of the box from its element `first` on.

    Args:
        bits: the elements as 32-bit floats, in one dimension.
        first: index in the box of the first element.
        box: its first element is at `box.offsets` in the full tensor.
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
    """The fingerprint sum over elements of a box, from its element `first` on, on any device.

    Args:
        numel: number of elements.
        first: index in the box of the first element.
        box: of the elements.
        of_run: sums elements [begin, end), counted from `first`, contiguous from a place on.
        of_short: the same, not contiguous.
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
    """The places in the full flattened tensor of elements, given their indices in the box."""
    found = elements * 0
    stride = 1
    for size, offset, whole in zip(reversed(box.size), reversed(box.offsets), reversed(box.shape), strict=True):
        found = found + (elements % size + offset) * stride
        elements = elements // size
        stride *= whole
    return found
