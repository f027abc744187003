"""Read every byte of a checkpoint once, in blocks, with several workers, and keep the positions of odd elements."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_patches.audit.judging import blocks
from ckpt_patches.formats.checkpoint import Shard, Stream
from ckpt_patches.formats.dtypes import item_size
from ckpt_patches.formats.elements import BLOCK, BlockReader, PartRead
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.runtime.processes import in_order

SPAN = 128 * BLOCK  # elements per task of a worker
QUICK_SPAN = 1024 * BLOCK  # elements; a smaller scan uses one process
MAX_RUNS = 1_000_000  # kept per shard, to bound memory for any checkpoint
SCATTERED = 8  # elements; shorter runs of zeros can be chance


class Span(NamedTuple):
    """A part of a shard, for one worker."""

    shard: int  # its number
    streams: dict[str, Stream]
    begin: int  # elements
    end: int
    checked: bool  # whether to compute checksums

    @property
    def nbytes(self) -> int:
        return sum((self.end - self.begin) * item_size(stream.dtype) for stream in self.streams.values())


class Tally(NamedTuple):
    """Elements with one bit of the code, including runs that are not kept."""

    elements: int
    begin: int  # the first
    end: int  # one past the last


class Odd(NamedTuple):
    """The odd elements of a block, a span or a shard: runs of adjacent ones with the same nonzero code, in order."""

    begin: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    code: npt.NDArray[np.uint16]
    tallies: dict[int, Tally]  # by bit of `blocks.CERTAIN`
    is_cut: bool = False  # runs other than short zeros were dropped

    def chosen(self, which: "npt.NDArray[Any]") -> "Odd":
        """These runs."""
        return self._replace(begin=self.begin[which], end=self.end[which], code=self.code[which])


NONE = Odd(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint16), {})


class Part(NamedTuple):
    """The result for a span."""

    shard: int  # its number
    odd: Odd
    pieces: list[PartRead]


def spans(shards: Iterable[Shard], checked: frozenset[str]) -> Iterator[Span]:
    """The spans of all shards, at least one of each; with checksums for files in `checked`."""
    for number, shard in enumerate(shards):
        has_checksums = any(extent.path in checked for extent in shard.extents)
        numel = shard.numel if shard.streams else 0
        for begin in range(0, max(numel, 1), SPAN):
            yield Span(number, shard.streams, begin, min(begin + SPAN, numel), has_checksums)


def scan(spans: Sequence[Span], workers: int, progress: Callable[[int], object]) -> Iterator[Part]:
    """Scan spans in order. Calls `progress` with the number of bytes read so far.

    Each process opens the files itself, for this scan only.
    """
    if sum(span.end - span.begin for span in spans) < QUICK_SPAN:
        workers = 1
    done = 0
    with RangedFiles() as files:
        own = functools.partial(look, files=files)
        found = map(own, spans) if workers < 2 else in_order(own, spans, workers)
        for span, part in zip(spans, found, strict=True):
            done += span.nbytes
            progress(done)
            yield part


def look(span: Span, files: RangedFiles) -> Part:
    """Read a span and find its odd runs."""
    found = []
    most = min(BLOCK, span.end - span.begin)
    readers = {role: BlockReader(stream, most, files, checked=span.checked) for role, stream in span.streams.items()}
    for begin in range(span.begin, span.end, BLOCK):
        end = min(begin + BLOCK, span.end)
        block = {role: (reader.read(begin, end), reader.stream.dtype) for role, reader in readers.items()}
        if not blocks.is_clean(block):
            found.append(runs_of(blocks.codes(block, end - begin), begin))
    odd = joined(found)
    tallies = {bit: tally for bit in blocks.CERTAIN if (tally := _tally(odd, bit))}
    return Part(span.shard, _kept(odd._replace(tallies=tallies)), [own for r in readers.values() for own in r.pieces])


def by_shard(parts: Iterable[Part], pieces: list[PartRead]) -> Iterator[Odd]:
    """The odd elements of each shard in turn, so that only one shard's runs are in memory.

    Parts are in order; their checksums are added to `pieces`.
    """
    for _, own in itertools.groupby(parts, key=attrgetter("shard")):
        odd = NONE
        for part in own:
            pieces += part.pieces
            odd = _kept(joined([odd, part.odd]))
        yield odd


def stretches(odd: Odd, bits: int) -> list[tuple[int, int]]:
    """The maximal ranges of elements that have all these bits."""
    chosen = odd.chosen((odd.code & bits) == bits)
    merged = joined([chosen._replace(code=np.full_like(chosen.code, bits))])
    return list(zip(merged.begin.tolist(), merged.end.tolist(), strict=True))


def runs_of(code: blocks.Codes, begin: int) -> Odd:
    """The odd runs of a block that begins at element `begin`."""
    starts = np.flatnonzero(np.diff(code, prepend=~code[:1]))
    runs = Odd(starts + begin, np.append(starts[1:], len(code)) + begin, code[starts], {})
    return runs.chosen(runs.code != 0)


def joined(parts: Sequence[Odd]) -> Odd:
    """Concatenate parts in order; merge runs that continue in the next part."""
    begin, end, code = (np.concatenate(column) for column in list(zip(NONE, *parts, strict=True))[:3])
    cut = (begin[1:] != end[:-1]) | (code[1:] != code[:-1])
    any_run = np.full(min(len(begin), 1), True)
    first, last = np.concatenate([any_run, cut]), np.concatenate([cut, any_run])
    tallies: dict[int, Tally] = {}
    for bit, own in (one for part in parts for one in part.tallies.items()):
        before = tallies.get(bit, own._replace(elements=0))
        tallies[bit] = Tally(before.elements + own.elements, before.begin, own.end)
    return Odd(begin[first], end[last], code[first], tallies, any(part.is_cut for part in parts))


def without(odd: Odd, ranges: Sequence[tuple[int, int]], bits: int, unless: int = 0) -> Odd:
    """The runs, with these bits cleared in these ranges of elements, but for runs with one of `unless`.

    In one pass: there can be many runs and ranges.
    """
    if not ranges or not len(odd.begin):
        return odd
    last = int(odd.end[-1])
    edges = np.sort(np.array([(min(low, last), min(high, last)) for low, high in ranges], np.int64), axis=0)
    cuts = np.unique(edges)
    run = np.searchsorted(odd.begin, cuts) - 1  # that begins before
    cuts = cuts[(run >= 0) & (cuts < odd.end[run])]
    begin, end = np.sort(np.concatenate([odd.begin, cuts])), np.sort(np.concatenate([odd.end, cuts]))
    code = odd.code[np.searchsorted(odd.begin, begin, "right") - 1]
    begun, ended = (np.searchsorted(of_ranges, begin, "right") for of_ranges in edges.T)
    code = np.where((begun > ended) & (code & np.uint16(unless) == 0), code & np.uint16(0xFFFF ^ bits), code)
    runs = joined([odd._replace(begin=begin, end=end, code=code)])
    return runs.chosen(runs.code > 0)


def _kept(odd: Odd) -> Odd:
    """At most `MAX_RUNS` runs: those with certain damage, then the longest. `is_cut` if one of these is dropped."""
    if len(odd.begin) <= MAX_RUNS:
        return odd
    is_certain = (odd.code & sum(blocks.CERTAIN)) > 0
    value = odd.end - odd.begin + np.where(is_certain, np.iinfo(np.int64).max // 2, 0)
    kept, dropped = np.split(np.argpartition(-value, MAX_RUNS), [MAX_RUNS])
    is_cut = odd.is_cut or bool((value[dropped] >= SCATTERED).any())
    return odd.chosen(np.sort(kept))._replace(is_cut=is_cut)


def _tally(odd: Odd, bit: int) -> Tally | None:
    own = odd.chosen((odd.code & bit) > 0)
    if not len(own.begin):
        return None
    return Tally(int((own.end - own.begin).sum()), int(own.begin[0]), int(own.end[-1]))
