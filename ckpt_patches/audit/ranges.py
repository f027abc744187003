"""Half-open ranges of bytes or elements."""

from collections.abc import Iterable

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
