"""Find all layouts of a saved shard that the model's weights allow: which elements of which parameters it holds.

A saved shard is a part of a gradient buffer: consecutive parameters, each aligned to a multiple of `ALIGNMENT`
elements, with zeros in between. `shifted.py` explains why a shard can begin in the wrong place.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ckpt_patches.audit.judging import blocks
from ckpt_patches.formats import elements
from ckpt_patches.formats.checkpoint import MASTER, MOMENTS, WEIGHT, Shard, Stream
from ckpt_patches.formats.dtypes import item_size
from ckpt_patches.formats.elements import BLOCK, read_elements

ALIGNMENT = 64  # elements: each parameter begins at a multiple of this in its buffer
PROBE = 64  # elements compared at each place before a full shard is compared
CERTAIN, DISTINCT = 16, 8  # a match of CERTAIN elements, DISTINCT of them different, is not chance
FARTHEST = 1 << 22  # elements: the largest shift searched for
HEADS = 1 << 25  # elements of all parameters' first parts, kept in memory
LEAST_HEAD = 4096
MOST_CANDIDATES = 256  # layouts of one shard; with more, nothing is certain
MOST_PLACES = 4096  # tried for one shard
SMALL, KEPT = 1 << 16, 256  # elements of an array that is cached, and the number of cached arrays
MOST_STEPS = 4096  # parameters tried as the next one, for one shard
LONGEST = 200  # parameters in one saved shard
SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}  # bytes of a weight, for dtypes that masters round to

Floats: TypeAlias = "npt.NDArray[np.float32]"
Places: TypeAlias = "npt.NDArray[np.int64]"


class Run(NamedTuple):
    """Elements of a saved shard, and the shard that they belong to."""

    begin: int  # in the saved shard
    piece: int  # the number of the shard that they belong to
    offset: int  # in that shard
    length: int


Candidate: TypeAlias = tuple[Run, ...]  # the layout of a saved shard; elements in no run are padding


class TooMany(Exception):
    """A shard has more possible layouts than the search tries."""


@functools.lru_cache(maxsize=KEPT)
def _whole(stream: Stream) -> elements.Block:
    return read_elements(stream, 0, stream.numel)


def forget() -> None:
    """Clear the cache of arrays read from files."""
    _whole.cache_clear()


def _read(stream: Stream, begin: int, end: int) -> elements.Block:
    """The bytes of elements `begin` to `end`, which must not be changed."""
    if stream.numel > SMALL:
        return read_elements(stream, begin, end)
    size = item_size(stream.dtype)
    return _whole(stream)[begin * size : end * size]


class Piece:
    """A saved shard, and the weights of the parameter that it should hold."""

    def __init__(self, number: int, shard: Shard) -> None:
        self.number, self.shard, self.numel = number, shard, shard.numel
        self.dtype = shard.streams[WEIGHT].dtype
        self.gap = -shard.numel % ALIGNMENT  # padding before the next parameter of the same bucket

    def weights(self, begin: int, end: int) -> elements.Block:
        """The bits of the weights, as integers."""
        return _read(self.shard.streams[WEIGHT], begin, end).view(f"u{SIZES[self.dtype]}")

    def state(self, role: str, begin: int, end: int) -> Floats:
        return _read(self.shard.streams[role], begin, end).view(np.float32)

    def is_padding(self, begin: int, end: int) -> bool:
        """Whether the elements are zero in all states, as in the gaps between parameters."""
        return all(
            not self.state(role, first, min(first + BLOCK, end)).any()
            for role in (MASTER, *MOMENTS)
            for first in range(begin, end, BLOCK)
        )

    def leading_padding(self) -> int:
        """The number of padding elements at the start, at most `ALIGNMENT`."""
        most = min(ALIGNMENT, self.numel)
        used = np.any([self.state(role, 0, most) != 0 for role in (MASTER, *MOMENTS)], axis=0)
        return int(np.argmax(used)) if used.any() else most

    def holds(self, begin: int, other: "Piece", offset: int, length: int) -> bool:
        """Whether `length` masters saved from `begin` on round to the weights of `other` from `offset` on."""
        for first in range(0, length, BLOCK):
            last = min(first + BLOCK, length)
            masters = self.state(MASTER, begin + first, begin + last)
            if not blocks.is_nearest(masters, other.weights(offset + first, offset + last), other.dtype).all():
                return False
        return True


def certain_shift(piece: Piece) -> int | None:
    """The shift of a shard if its own elements prove it without its neighbors; else None."""
    try:
        places = [by for by in own_places(piece) if piece.numel - by >= CERTAIN]
    except TooMany:
        return None
    found = [by for by in places if piece.holds(0, piece, by, piece.numel - by)]
    if len(found) != 1:
        return None
    told = np.unique(piece.weights(found[0], min(found[0] + LEAST_HEAD, piece.numel)))
    return found[0] if len(told) >= DISTINCT else None


def own_places(piece: Piece) -> list[int]:
    """The offsets in the shard's own weights where the first saved masters can belong.

    Raises:
        TooMany: too many offsets match, as with one repeated number.
    """
    probe = piece.state(MASTER, 0, min(PROBE, piece.numel))
    limit = min(piece.numel, FARTHEST)
    weights = piece.weights(0, min(piece.numel, limit + PROBE))
    found = _places(probe, weights, piece.dtype, np.arange(limit), np.full(limit, len(weights)))
    if len(found) > MOST_PLACES:
        raise TooMany
    numbers: list[int] = found.tolist()
    return numbers


def _places(probe: Floats, weights: elements.Block, dtype: str, places: Places, ends: Places) -> Places:
    """The places from which the weights agree with the probe, as far as the parameter reaches.

    `ends` has the end of the parameter for each place.
    """
    for number, value in enumerate(probe):
        inside = places + number < ends
        chosen = weights[np.where(inside, places + number, 0)]
        agree = ~inside | blocks.is_nearest(np.full(len(places), value, np.float32), chosen, dtype)
        places, ends = places[agree], ends[agree]
        if not len(places):
            break
    return places


class Reader:
    """Finds the possible layouts of a saved shard."""

    def __init__(self, pieces: list[Piece], certain: dict[int, int]) -> None:
        self.pieces, self.certain = pieces, certain
        self.steps = 0
        self.head = max(min(2 * max(certain.values()) + LEAST_HEAD, HEADS // len(pieces)), 1)
        # A gated layer's first matrix is one parameter of the buffer, and its halves are saved as two shards. The
        # checkpoint does not record which parameters are gated: any with several shards can be.
        cut = Counter(piece.shard.parameter for piece in pieces)
        self.halves = {piece.number for piece in pieces if cut[piece.shard.parameter] > 1}
        self.by_dtype: dict[str, list[Piece]] = {}
        for piece in pieces:
            self.by_dtype.setdefault(piece.dtype, []).append(piece)
        self.heads = {dtype: self._heads(own) for dtype, own in self.by_dtype.items()}

    def _heads(self, pieces: list[Piece]) -> tuple[Places, elements.Block]:
        """The start of each parameter in the concatenated heads, and these heads."""
        parts = [piece.weights(0, min(self.head, piece.numel)) for piece in pieces]
        starts = np.cumsum([0, *(len(part) for part in parts)])
        return starts, np.concatenate(parts)

    def candidates(self, piece: Piece) -> list[Candidate]:
        """All layouts that fit what is known of the buffer; empty if there are too many."""
        self.steps = 0
        try:
            found = list(itertools.islice(self._candidates_of(piece), MOST_CANDIDATES + 1))
        except TooMany:
            return []
        return found if len(found) <= MOST_CANDIDATES else []

    def _candidates_of(self, piece: Piece) -> Iterator[Candidate]:
        for by in self._own_places(piece):
            own = Run(0, piece.number, by, piece.numel - by)
            yield from self._behind(piece, (own,))
        if piece.number not in self.certain:
            yield from self._elsewhere(piece)

    def _own_places(self, piece: Piece) -> list[int]:
        """The shifts with which a shard begins with elements of its own parameter."""
        if piece.number in self.certain:
            return [self.certain[piece.number]]
        return [by for by in own_places(piece) if piece.holds(0, piece, by, piece.numel - by)]

    def _elsewhere(self, saved: Piece) -> Iterator[Candidate]:
        """Layouts without elements of the shard's own parameter, which is not longer than the shift."""
        padding = saved.leading_padding()
        if padding:
            if saved.is_padding(0, saved.numel):
                yield ()
            else:
                yield from self._from(saved, padding, ())
            return
        for other, offset in self._anywhere(saved):
            length = min(other.numel - offset, saved.numel)
            if saved.holds(0, other, offset, length):
                yield from self._behind(saved, (Run(0, other.number, offset, length),))

    def _anywhere(self, saved: Piece) -> Iterator[tuple[Piece, int]]:
        """Other parameters, with the offset in their heads where the first saved masters match."""
        probe = saved.state(MASTER, 0, min(PROBE, saved.numel))
        for dtype, (starts, heads) in self.heads.items():
            ends = np.repeat(starts[1:], np.diff(starts))
            places = _places(probe, heads, dtype, np.arange(len(heads)), ends)
            if len(places) > MOST_PLACES:
                raise TooMany
            for place in places.tolist():
                number = int(np.searchsorted(starts, place, "right")) - 1
                run = Run(0, self.by_dtype[dtype][number].number, place - int(starts[number]), 0)
                if self._fits(saved, run):
                    yield self.pieces[run.piece], run.offset

    def _behind(self, saved: Piece, candidate: Candidate) -> Iterator[Candidate]:
        """The full layouts that continue this one, which ends at the end of a parameter."""
        at, before = candidate[-1].begin + candidate[-1].length, self.pieces[candidate[-1].piece]
        if at == saved.numel or saved.is_padding(at, saved.numel):
            yield candidate
            return
        gaps = {0, before.gap, -2 * before.numel % ALIGNMENT if before.number in self.halves else 0}
        for gap in sorted(gaps):
            if at + gap < saved.numel and saved.is_padding(at, at + gap):
                yield from self._from(saved, at + gap, candidate)

    def _from(self, saved: Piece, at: int, candidate: Candidate) -> Iterator[Candidate]:
        """The full layouts that continue this one with a parameter that begins at `at`."""
        if len(candidate) > LONGEST:
            raise TooMany
        used: Collection[int] = {saved.number, *(run.piece for run in candidate)}
        value = saved.state(MASTER, at, at + 1)
        for dtype, (starts, heads) in self.heads.items():
            firsts = heads[starts[:-1]]
            agree = blocks.is_nearest(np.repeat(value, len(firsts)), firsts, dtype)
            for number in np.flatnonzero(agree).tolist():
                self.steps += 1
                if self.steps > MOST_STEPS:
                    raise TooMany
                other = self.by_dtype[dtype][number]
                run = Run(at, other.number, 0, min(other.numel, saved.numel - at))
                fits = other.number not in used and self._fits(saved, run)
                if fits and saved.holds(at, other, 0, run.length):
                    yield from self._behind(saved, (*candidate, run))

    def _fits(self, saved: Piece, run: Run) -> bool:
        """Whether another parameter, if its shift is certain, begins aligned and after the saved one."""
        if run.piece not in self.certain:
            return run.piece != saved.number
        distance = run.begin - run.offset + self.certain[run.piece]
        return run.piece != saved.number and distance >= saved.numel and self._is_aligned(saved, run.piece, distance)

    def _is_aligned(self, saved: Piece, other: int, distance: int) -> bool:
        """Whether two parameters can be `distance` elements apart. A second half need not be aligned."""
        before = {0, saved.numel if saved.number in self.halves else 0}
        behind = {0, self.pieces[other].numel if other in self.halves else 0}
        return any((distance + a - b) % ALIGNMENT == 0 for a in before for b in behind)
