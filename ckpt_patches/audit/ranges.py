"""Half-open ranges of bytes or elements."""

import bisect
from collections.abc import Iterable, Iterator

from ckpt_patches.formats.checkpoint import Extent

Range = tuple[int, int]


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Sort the ranges; merge those that overlap or touch."""
    found: list[Range] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def overlap(ranges: Iterable[Range], begin: int, end: int) -> int:
    """How much of a range is in the others, which are from `joined`."""
    return sum(max(0, min(last, end) - max(first, begin)) for first, last in ranges)


def gaps(begin: int, end: int, ranges: list[Range]) -> Iterator[Range]:
    """The parts of a range that are in none of `ranges`, which are from `joined`."""
    for number in range(max(bisect.bisect_right(ranges, (begin, end)) - 1, 0), len(ranges)):
        first, last = ranges[number]
        if first >= end:
            break
        if first > begin:
            yield begin, first
        begin = max(begin, last)
    if begin < end:
        yield begin, end


class FileRanges:
    """Byte ranges of files, merged where they overlap or touch."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        by_path: dict[str, list[Range]] = {}
        for path, offset, nbytes in extents:
            by_path.setdefault(path, []).append((offset, offset + nbytes))
        self._by_path = {path: joined(ranges) for path, ranges in by_path.items()}

    def gaps(self, extent: Extent) -> Iterator[Extent]:
        """The parts of the extent that are in no range."""
        path, begin, nbytes = extent
        for first, last in gaps(begin, begin + nbytes, self._by_path.get(path, [])):
            yield Extent(path, first, last - first)

    def meet(self, extent: Extent) -> bool:
        """Whether a range overlaps the extent."""
        return next(self.gaps(extent), None) != extent

    def cover(self, extent: Extent) -> bool:
        """Whether the ranges contain the full extent."""
        return next(self.gaps(extent), None) is None
