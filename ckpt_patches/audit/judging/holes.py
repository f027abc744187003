"""Find holes in runs of odd elements: lost slices of an array, with their exact edges.

A lost slice is zeros. So are the moments of elements that never had a gradient: full rows (an unseen token, a unit
that never fired), or the same columns in every row (a unit of the previous layer).
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_patches.audit.judging.scan import SCATTERED, OddRuns

# Zeros by chance: their least assumed share, and the expected number below which a run of them is a hole.
LEAST_SHARE = 1e-6
BY_CHANCE = 1e-5


class Hole(NamedTuple):
    """A run of zeros in which some elements cannot be zero: the first and last of these are its inner edges."""

    begin: int
    end: int
    outer_begin: int  # the full run of zeros, with elements that can truly be zero
    outer_end: int
    elements: int  # that cannot be zero


def stretches(runs: OddRuns, bits: int) -> list[tuple[int, int]]:
    """The maximal ranges of elements that have all these bits."""
    chosen = (runs.code & bits) == bits
    begin, end = runs.begin[chosen], runs.end[chosen]
    first = np.concatenate([[True], begin[1:] != end[:-1]]) if len(begin) else np.empty(0, np.bool_)
    last = np.concatenate([first[1:], [True]]) if len(begin) else first
    return list(zip(begin[first].tolist(), end[last].tolist(), strict=True))


def holes(runs: OddRuns, bits: int, certain: npt.NDArray[np.bool_]) -> list[Hole]:
    """The stretches of zeros (`bits`) with at least one run that is certainly lost (`certain`)."""
    where = np.flatnonzero(certain)
    found, at = [], 0
    for begin, end in stretches(runs, bits):
        first = at + int(np.searchsorted(runs.begin[where[at:]], begin))
        at = first + int(np.searchsorted(runs.begin[where[first:]], end))
        if at > first:
            own = where[first:at]
            elements = int((runs.end[own] - runs.begin[own]).sum())
            found.append(Hole(int(runs.begin[own[0]]), int(runs.end[own[-1]]), begin, end, elements))
    return found


def snapped(hole: Hole, edges: Iterable[int], reach: int) -> Hole:
    """Extend a hole to nearby edges within its zeros: ranks cut all states alike, and shards have ends.

    Zeros more than `reach` elements away can be valid, such as vocabulary padding.
    """
    first, last = max(hole.outer_begin, hole.begin - reach), min(hole.outer_end, hole.end + reach)
    begin = max((edge for edge in edges if first <= edge <= hole.begin), default=hole.begin)
    end = min((edge for edge in edges if hole.end <= edge <= last), default=hole.end)
    return hole._replace(begin=begin, end=end)


def edges_of(found: Iterable[Hole]) -> set[int]:
    return {edge for hole in found for edge in (hole.begin, hole.end)}


def by_no_chance(found: list[Hole], numel: int) -> list[Hole]:
    """The holes that are too long to be zeros by chance. Single zeros also occur in a complete checkpoint."""
    scattered = sum(hole.elements for hole in found if hole.elements < SCATTERED) if len(found) > 2 else 0
    share = max(scattered / max(numel, 1), LEAST_SHARE)
    return [hole for hole in found if _places(hole, numel) * share ** min(hole.elements, 64) < BY_CHANCE]


def _places(hole: Hole, numel: int) -> int:
    """The number of places for such a hole; few at the ends of a shard, where lost slices are common."""
    return 2 if hole.outer_begin == 0 or hole.outer_end == numel else numel


class Rows:
    """Detects ranges whose edges are those of rows, or of columns that other ranges share."""

    def __init__(self, ranges: Iterable[tuple[int, int]], row: int, others: Iterable[int] = ()) -> None:
        self.row, self.others = row, set(others)  # edges that are known not to be of a loss
        ranges = list(ranges)
        self.begins = Counter(begin % row for begin, _ in ranges)
        self.ends = Counter(end % row for _, end in ranges)

    def has(self, begin: int, end: int) -> bool:
        """Whether both edges of one of the given ranges are edges of rows or of shared columns."""
        first, last = begin % self.row, end % self.row
        at_begin = first == 0 or self.begins[first] > 1 or begin in self.others
        return at_begin and (last == 0 or self.ends[last] > 1 or end in self.others)
