"""Ranges of bytes or of elements, each from its first up to but without its end."""

from collections.abc import Iterable

Range = tuple[int, int]


def joined(ranges: Iterable[Range]) -> list[Range]:
    """In order, with those as one that overlap or touch."""
    found: list[Range] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found
