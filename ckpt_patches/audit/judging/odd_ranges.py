"""Ranges of odd elements of a shard: which of them are lost slices, and a finding for each."""

import bisect
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckpt_patches.audit.judging.scan import Odd, OddRuns, stretches
from ckpt_patches.audit.ranges import Range
from ckpt_patches.formats import damages
from ckpt_patches.formats.checkpoint import Checkpoint, Shard
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.zero_inventory import numbered

LEAST = 4  # elements of a lost slice; fewer zeros also occur in a complete state
SLICES_PER_RANK = 2  # a write that is lost leaves one range, or two where it is between others
SMALL = 1 << 12  # elements
# Megatron's buckets have padding with undefined content: after a parameter, and at the end.
PADDING, ALIGNMENT = 1024, 256  # elements; ALIGNMENT is per data-parallel rank
NEAR = 64  # elements: wrong elements at most this far apart are one range
MOST_FINDINGS = 1000  # of one kind in one array; more are merged


@dataclass(frozen=True)
class Seen:
    """A shard, and what is odd in it."""

    shard: Shard
    odd: Odd
    found: Checkpoint

    @property
    def least(self) -> int:
        """The fewest elements of a lost slice: in a bucket, more than any padding."""
        return LEAST if self.shard.has_rows else max(PADDING, ALIGNMENT * (self.found.data_parallel or 1))

    def findings(
        self, kind: damages.FindingKind, role: str, ranges: Sequence[Range], detail: str = ""
    ) -> Iterator[Finding]:
        """A finding for each range, or for all of them if they are too many to show."""
        if len(ranges) > MOST_FINDINGS:
            ranges, detail = [(ranges[0][0], ranges[-1][1])], f"{len(ranges)} places of these"
        for begin, end in ranges:
            own = ", ".join(filter(None, (detail, written_by(self.shard, begin, end, self.found.data_parallel))))
            yield Finding(kind, self.shard.streams[role].array, own, self.shard.label, begin, end)

    def of_all(self, kind: damages.FindingKind, role: str, detail: str = "") -> Iterator[Finding]:
        """A finding for all elements."""
        return self.findings(kind, role, [(0, self.shard.numel)], detail)


def written_by(shard: Shard, begin: int, end: int, data_parallel: int | None) -> str:
    """Name the ranks that wrote a range, by the files or an even division among ranks; empty if unknown."""
    owners = shard.owners
    ranks = [owner.rank for owner in owners if owner.begin < end and begin < owner.end]
    if len(owners) > 1 and any(ranks):
        return f"written by {ranks[0]}" + (f" to {ranks[-1]}" if len(ranks) > 1 else "")
    if not data_parallel or shard.numel % data_parallel:
        return ""
    part = shard.numel // data_parallel
    if begin % part or end % part or (begin, end) == (0, shard.numel):
        return ""
    return f"of data-parallel {numbered(begin // part, end // part - 1, data_parallel)}"


def holes(runs: OddRuns, bits: int, certain: npt.NDArray[np.bool_]) -> list[Range]:
    """In each run of zeros (`bits`), the range from the first to the last element that cannot be zero (`certain`)."""
    where = np.flatnonzero(certain)
    found, at = [], 0
    for begin, end in stretches(runs, bits):
        first = at + int(np.searchsorted(runs.begin[where[at:]], begin))
        at = first + int(np.searchsorted(runs.begin[where[first:]], end))
        if at > first:
            found.append((int(runs.begin[where[first]]), int(runs.end[where[at - 1]])))
    return found


def few(seen: Seen, ranges: list[Range]) -> list[Range]:
    """The ranges that can be lost slices: those of which a data-parallel rank can have lost that many.

    Quantized or sparse moments have zeros in many places of all lengths. Counted are the ranges that are a quarter as
    long, or longer; in a small shard, all of them.
    """
    most = SLICES_PER_RANK * (seen.found.data_parallel or 1)
    lengths = sorted(end - begin for begin, end in ranges)
    found = []
    for begin, end in ranges:
        least = 1 if seen.shard.numel < SMALL else (end - begin) // 4
        if end - begin >= seen.least and len(lengths) - bisect.bisect_left(lengths, least) <= most:
            found.append((begin, end))
    return found


def wrong(seen: Seen, kind: damages.FindingKind, role: str, bit: int) -> Iterator[Finding]:
    """Findings for the elements with a bit; nearby elements form one range."""
    if bit not in seen.odd.tallies:
        return
    if not seen.shard.has_rows:
        kind = damages.ODD_IN_BUCKET
    chosen, tally = seen.odd.runs.code & bit > 0, seen.odd.tallies[bit]
    begin, end = seen.odd.runs.begin[chosen], seen.odd.runs.end[chosen]
    cuts = np.flatnonzero(begin[1:] - end[:-1] > NEAR) + 1
    if tally.elements != (end - begin).sum() or len(cuts) >= MOST_FINDINGS:  # some runs were dropped, or they are many
        hull = tally.begin, tally.end
        yield from seen.findings(kind, role, [hull], f"{tally.elements} elements of these")
        return
    for first, last in zip(np.split(begin, cuts), np.split(end, cuts), strict=True):
        low, high, count = int(first[0]), int(last[-1]), int((last - first).sum())
        detail = "" if count == high - low else f"{count} elements of these"
        yield from seen.findings(kind, role, [(low, high)], detail)


def irregular(ranges: list[Range], row: int, known: Set[int]) -> list[Range]:
    """The ranges whose edges are neither those of rows, nor of columns that are zero in two rows that follow.

    A mask that prunes elements at random leaves many of them, of which some share columns by chance.
    """
    every = {*ranges}
    twins = [own for own in ranges if every & {(own[0] + row, own[1] + row), (own[0] - row, own[1] - row)}]
    columns = {0, *(edge % row for own in twins for edge in own)}
    return [own for own in ranges if not all(edge % row in columns or edge in known for edge in own)]
