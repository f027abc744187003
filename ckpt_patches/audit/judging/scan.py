"""Read every byte of a checkpoint once, in blocks, with several workers, and keep the positions of odd elements."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

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
SCATTERED = 8  # elements; shorter runs of zeros can be chance, and are dropped first


class OddRuns(NamedTuple):
    """Runs of adjacent elements with the same nonzero code, in order."""

    begin: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    code: npt.NDArray[np.uint16]

    @property
    def length(self) -> npt.NDArray[np.int64]:
        return self.end - self.begin


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
    """The odd elements of a span or a shard."""

    runs: OddRuns
    is_cut: bool  # runs other than short zeros were dropped
    tallies: dict[int, Tally]  # by bit of `blocks.CERTAIN`


class Part(NamedTuple):
    """The result for a span, or for several of a shard."""

    shard: int  # its number
    odd: Odd
    pieces: list[PartRead]


def by_shard(parts: Iterable[Part], count: int, pieces: list[PartRead]) -> Iterator[Odd]:
    """The odd elements of each of `count` shards in turn, so that only one shard's runs are in memory.

    Parts are in order; their checksums are added to `pieces`.
    """
    number = 0
    own: list[Odd] = []
    for part in parts:
        while number < part.shard:
            yield together(own)
            number, own = number + 1, []
        own = [together([*own, part.odd])]
        pieces += part.pieces
    for _ in range(number, count):
        yield together(own)
        own = []


def spans(shards: list[Shard], checked: frozenset[str]) -> Iterator[Span]:
    """The spans of all shards; with checksums for files in `checked`."""
    for number, shard in enumerate(shards):
        has_checksums = any(extent.path in checked for extent in shard.extents)
        yield from spans_of(number, shard, checked=has_checksums)


def spans_of(number: int, shard: Shard, *, checked: bool) -> Iterator[Span]:
    """The spans of one shard."""
    for begin in range(0, shard.numel if shard.streams else 0, SPAN):
        yield Span(number, shard.streams, begin, min(begin + SPAN, shard.numel), checked)


def scan(spans: Sequence[Span], workers: int, progress: Callable[[int], object]) -> Iterator[Part]:
    """Scan spans in order. Calls `progress` with the number of bytes read so far.

    Each process opens the files itself, for this scan only.
    """
    if sum(span.end - span.begin for span in spans) < QUICK_SPAN:
        workers = 1
    done = 0
    with RangedFiles() as files:
        own = partial(look, files=files)
        found = map(own, spans) if workers < 2 else in_order(own, spans, workers)
        for span, part in zip(spans, found, strict=True):
            done += span.nbytes
            progress(done)
            yield part


def look(span: Span, files: RangedFiles) -> Part:
    """Read a span and find its odd runs."""
    parts = []
    most = min(BLOCK, span.end - span.begin)
    readers = {role: BlockReader(stream, most, files, checked=span.checked) for role, stream in span.streams.items()}
    for begin in range(span.begin, span.end, BLOCK):
        end = min(begin + BLOCK, span.end)
        block = {role: (reader.read(begin, end), reader.stream.dtype) for role, reader in readers.items()}
        if not blocks.is_clean(block):
            parts.append(runs_of(blocks.codes(block, end - begin), begin))
    return Part(span.shard, odd_of(joined(parts)), [piece for reader in readers.values() for piece in reader.pieces])


def stretches(runs: OddRuns, bits: int) -> list[tuple[int, int]]:
    """The maximal ranges of elements that have all these bits."""
    chosen = (runs.code & bits) == bits
    begin, end = runs.begin[chosen], runs.end[chosen]
    first = np.concatenate([[True], begin[1:] != end[:-1]]) if len(begin) else np.empty(0, np.bool_)
    last = np.concatenate([first[1:], [True]]) if len(begin) else first
    return list(zip(begin[first].tolist(), end[last].tolist(), strict=True))


def runs_of(code: blocks.Codes, begin: int) -> OddRuns:
    """The odd runs of a block that begins at element `begin`."""
    edges = np.flatnonzero(np.diff(code)) + 1
    starts = np.concatenate([[0], edges]).astype(np.int64)
    ends = np.concatenate([edges, [len(code)]]).astype(np.int64)
    own = code[starts]
    odd = own != 0
    return OddRuns(starts[odd] + begin, ends[odd] + begin, own[odd])


def joined(parts: list[OddRuns]) -> OddRuns:
    """Concatenate parts in order; merge runs that continue in the next part."""
    if not parts:
        return OddRuns(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint16))
    begin, end, code = (np.concatenate(column) for column in zip(*parts, strict=True))
    cut = (begin[1:] != end[:-1]) | (code[1:] != code[:-1])
    any_run = np.full(min(len(begin), 1), True)
    first, last = np.concatenate([any_run, cut]), np.concatenate([cut, any_run])
    return OddRuns(begin[first], end[last], code[first])


def without(runs: OddRuns, ranges: Iterable[tuple[int, int]], bits: int) -> OddRuns:
    """The runs, with these bits cleared in these ranges of elements."""
    for low, high in ranges:
        parts = [_within(runs, 0, low), _within(runs, low, high), _within(runs, high, np.iinfo(np.int64).max)]
        parts[1] = parts[1]._replace(code=parts[1].code & np.uint16(0xFFFF ^ bits))
        runs = joined(parts)
        runs = OddRuns(*(column[runs.code > 0] for column in runs))
    return runs


def _within(runs: OddRuns, low: int, high: int) -> OddRuns:
    begin, end = np.clip(runs.begin, low, high), np.clip(runs.end, low, high)
    return OddRuns(*(column[begin < end] for column in (begin, end, runs.code)))


def odd_of(runs: OddRuns) -> Odd:
    """The runs of a span that are kept, and exact tallies of all its runs."""
    tallies = {bit: tally for bit in blocks.CERTAIN if (tally := _tally(runs, bit))}
    return Odd(*_kept(runs), tallies)


def _kept(runs: OddRuns) -> tuple[OddRuns, bool]:
    """At most `MAX_RUNS` runs, and whether runs other than short zeros were dropped.

    Short runs of zeros are dropped first, then the shorter ones of the others; runs with certain damage last.
    """
    if len(runs.begin) <= MAX_RUNS:
        return runs, False
    is_certain = (runs.code & sum(blocks.CERTAIN)) > 0
    chosen = np.flatnonzero(is_certain | (runs.length >= SCATTERED))
    is_cut = len(chosen) > MAX_RUNS
    if is_cut:
        value = runs.length[chosen] + np.where(is_certain[chosen], np.iinfo(np.int64).max // 2, 0)
        chosen = np.sort(chosen[np.argpartition(-value, MAX_RUNS)[:MAX_RUNS]])
    return OddRuns(*(column[chosen] for column in runs)), is_cut


def together(parts: list[Odd]) -> Odd:
    """Merge all parts of a shard, in order."""
    runs, is_cut = _kept(joined([part.runs for part in parts]))
    tallies: dict[int, Tally] = {}
    for part in parts:
        for bit, own in part.tallies.items():
            before = tallies.get(bit, own._replace(elements=0))
            tallies[bit] = Tally(before.elements + own.elements, before.begin, own.end)
    return Odd(runs, is_cut or any(part.is_cut for part in parts), tallies)


def _tally(runs: OddRuns, bit: int) -> Tally | None:
    chosen = np.flatnonzero(runs.code & bit)
    if not len(chosen):
        return None
    elements = int(runs.length[chosen].sum())
    return Tally(elements, int(runs.begin[chosen[0]]), int(runs.end[chosen[-1]]))
