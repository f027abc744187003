"""From runs of odd elements to holes: where a slice of an array was lost, with its exact edges.

A lost slice is zeros. So are parameters that never had a gradient, which come as whole rows (a token that was never
seen, a unit that never fired) or as the same columns in every row (a unit of the layer before).
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_patches.audit.judging.scan import SCATTERED, OddRuns

# Zeros that come by chance: at least so likely are they taken to be, and a hole is what is less likely than that.
LEAST_SHARE = 1e-6
BY_CHANCE = 1e-5


class Hole(NamedTuple):
    """A run of zeros of which some elements must not be zero: the first and the last of these are its inner edges."""

    begin: int
    end: int
    outer_begin: int  # the zeros may reach further, where zero can be the truth
    outer_end: int
    elements: int  # that must not be zero


def stretches(runs: OddRuns, bits: int) -> list[tuple[int, int]]:
    """The longest ranges of elements that have all these bits."""
    chosen = (runs.code & bits) == bits
    begin, end = runs.begin[chosen], runs.end[chosen]
    first = np.concatenate([[True], begin[1:] != end[:-1]]) if len(begin) else np.empty(0, np.bool_)
    last = np.concatenate([first[1:], [True]]) if len(begin) else first
    return list(zip(begin[first].tolist(), end[last].tolist(), strict=True))


def holes(runs: OddRuns, bits: int, certain: npt.NDArray[np.bool_]) -> list[Hole]:
    """The stretches of zeros (`bits`) with at least one run that is certainly none of the truth."""
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
    """The hole up to edges that lie near by in the zeros around it: ranks cut all states alike, and shards have ends.

    Further away than `reach` elements the zeros can be the truth, as padding of the vocabulary is.
    """
    first, last = max(hole.outer_begin, hole.begin - reach), min(hole.outer_end, hole.end + reach)
    begin = max((edge for edge in edges if first <= edge <= hole.begin), default=hole.begin)
    end = min((edge for edge in edges if hole.end <= edge <= last), default=hole.end)
    return hole._replace(begin=begin, end=end)


def edges_of(found: Iterable[Hole]) -> set[int]:
    return {edge for hole in found for edge in (hole.begin, hole.end)}


def by_no_chance(found: list[Hole], numel: int) -> list[Hole]:
    """Those that are too long to be zeros by chance, as single elements are here and there in a whole checkpoint."""
    scattered = sum(hole.elements for hole in found if hole.elements < SCATTERED) if len(found) > 2 else 0
    share = max(scattered / max(numel, 1), LEAST_SHARE)
    return [hole for hole in found if _places(hole, numel) * share ** min(hole.elements, 64) < BY_CHANCE]


def _places(hole: Hole, numel: int) -> int:
    """Where such a hole can be; slices often begin or end with the shard, chance has no liking for that."""
    return 2 if hole.outer_begin == 0 or hole.outer_end == numel else numel


class Rows:
    """Tells ranges whose edges are those of rows, or of columns that other ranges have as well."""

    def __init__(self, ranges: Iterable[tuple[int, int]], row: int, others: Iterable[int] = ()) -> None:
        self.row, self.others = row, set(others)  # others are known to be no edges of a loss
        ranges = list(ranges)
        self.begins = Counter(begin % row for begin, _ in ranges)
        self.ends = Counter(end % row for _, end in ranges)

    def has(self, begin: int, end: int) -> bool:
        """Whether both edges of a range, one of those given, are edges of rows or of such columns."""
        first, last = begin % self.row, end % self.row
        at_begin = first == 0 or self.begins[first] > 1 or begin in self.others
        return at_begin and (last == 0 or self.ends[last] > 1 or end in self.others)
