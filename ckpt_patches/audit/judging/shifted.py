"""Find the checkpoints in which megatron-core from 0.15.0 on saved the optimizer's state shifted.

There `fully_reshardable` cuts each parameter's state out of the gradient buffer at its place with the padding that ends
each bucket, and what it cuts it from has no such padding. So a parameter gets what lies k elements behind its own
beginning, k being all padding before it: its own elements from k on, then zeros that align the next parameter, then
that one's first elements, or zeros behind the buffer's end. https://github.com/NVIDIA/Megatron-LM/pull/5077

The layout of the buffer is not in the checkpoint. But the weights are, which the masters round to, and tell of each
saved element whose it is. All ways in which a shard can be read are looked for; what is read in one way only is
certain, and of the others what all ways agree in.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ckpt_patches.audit import damages
from ckpt_patches.audit.damages import Finding
from ckpt_patches.audit.judging.shift_search import SIZES, Piece, Reader, Run, Way, certain_shift, forget
from ckpt_patches.audit.readers.checkpoint import MASTER, MOMENTS, WEIGHT, Checkpoint, Shard

TYPE = "fully_reshardable"
MASTERS = "optimizer.state.param."  # in front of it stands what chains optimizers

# What a shift looks like to those who judge a shard by itself.
EXPLAINED = (
    damages.UNROUNDED_MASTER,
    damages.LOST_WEIGHT,
    damages.LOST_MASTER,
    damages.LOST_MOMENT,
    damages.MOMENT_GAP,
    damages.PARAMETER_WITHOUT_MOMENTS,
    damages.NO_GRADIENT,
)


@dataclass(frozen=True)
class Move:
    """Elements of all three states that lie in another place than their own; shards by their number."""

    source: int
    begin: int
    target: int
    offset: int
    length: int


@dataclass(frozen=True)
class Shift:
    """What is known of a shifted checkpoint."""

    shards: tuple[Shard, ...]
    by: tuple[int | None, ...]  # of each shard how many elements; None: could not tell
    moves: tuple[Move, ...]  # what lies in its right place is among them
    lost: tuple[tuple[tuple[int, int], ...], ...]  # of each shard the ranges that are in no file, or not for certain


def explained(found: Checkpoint, findings: list[Finding]) -> tuple[list[Finding], Shift | None]:
    """The findings, with those that a shift explains replaced by it; what was found of the shift."""
    suspect = {damages.UNROUNDED_MASTER, damages.LOST_WEIGHT, damages.LOST_MASTER}
    if found.sharding not in ("", TYPE) or not any(f.kind in suspect and MASTERS in f.array for f in findings):
        return findings, None
    try:
        shift = find([shard for shard in found.shards if _is_complete(shard)])
    finally:
        forget()
    if shift is None:
        return findings, None
    concerned = {
        (shard.streams[role].array, shard.label)
        for shard, by in zip(shift.shards, shift.by, strict=True)
        for role in (MASTER, *MOMENTS)
        if by != 0
    }
    untold = [_untold(shard) for shard in found.shards if _has_states(shard) and not _is_complete(shard)]
    kept = [f for f in findings if f.kind not in EXPLAINED or (f.array, f.shard) not in concerned]
    return [*_findings(shift), *untold, *kept], shift


def _has_states(shard: Shard) -> bool:
    return MASTER in shard.streams and MASTERS in shard.streams[MASTER].array and shard.numel > 0


def _untold(shard: Shard) -> Finding:
    """Of a shard that nothing can be said of, in a checkpoint where others are shifted."""
    what = {role: shard.streams[role].dtype if role in shard.streams else "none" for role in (WEIGHT, MASTER, *MOMENTS)}
    types = ", ".join(f"{role} {dtype}" for role, dtype in what.items())
    detail = f"whether it is shifted could not be told: other arrays or types than are compared ({types})"
    return Finding(damages.SHIFTED_STATE, shard.streams[MASTER].array, shard.label, 0, shard.numel, detail)


def _is_complete(shard: Shard) -> bool:
    """Whether all is there that tells whose elements a shard has; of other weights nothing rounds to them."""
    if not _has_states(shard) or not shard.streams.keys() >= {WEIGHT, *MOMENTS}:
        return False
    states = {shard.streams[role].dtype for role in (MASTER, *MOMENTS)}
    return states == {"float32"} and shard.streams[WEIGHT].dtype in SIZES


def _findings(shift: Shift) -> Iterator[Finding]:
    for shard, by, lost in zip(shift.shards, shift.by, shift.lost, strict=True):
        if by == 0:
            continue
        places = ", ".join(f"[{begin}, {end})" for begin, end in lost)
        far = "by how many elements could not be told" if by is None else f"by {by} elements"
        detail = f"{far}; found in no file: {places or 'none'}"
        yield Finding(damages.SHIFTED_STATE, shard.streams[MASTER].array, shard.label, 0, shard.numel, detail)


def find(shards: list[Shard]) -> Shift | None:
    """How far each shard is shifted, and whose elements it has; None where no shard certainly is shifted."""
    pieces = [Piece(number, shard) for number, shard in enumerate(shards)]
    found = ((piece.number, certain_shift(piece)) for piece in pieces)
    certain = {number: by for number, by in found if by is not None}
    if not any(certain.values()):
        return None
    reader = Reader(pieces, certain)
    ways = consistent([reader.ways(piece) for piece in pieces], pieces)
    if not any(by and ways[number] for number, by in certain.items()):
        return None  # what lies behind the elements of its own is of no other parameter
    read = [_common(own) or _own(piece, certain) for piece, own in zip(pieces, ways, strict=True)]
    moves, lost = _told(pieces, read)
    return Shift(tuple(shards), shifts(ways, pieces, certain), moves, lost)


class _Known:
    """The neighbours that parameters have in the shards that can be read in one way only."""

    def __init__(self, ways: list[list[Way]], pieces: list[Piece]) -> None:
        self.pieces = pieces
        self.before: dict[int, set[str]] = {}
        self.behind: dict[int, set[str]] = {}
        for left, right, _ in _sure_neighbours(ways, pieces):
            self.before.setdefault(right, set()).add(_name(pieces[left]))
            self.behind.setdefault(left, set()).add(_name(pieces[right]))

    def agrees(self, way: Way) -> bool:
        for left, right, _ in _neighbours(way, self.pieces):
            names = _name(self.pieces[left]), _name(self.pieces[right])
            if names[0] not in self.before.get(right, names) or names[1] not in self.behind.get(left, names):
                return False
        return True


def consistent(ways: list[list[Way]], pieces: list[Piece]) -> list[list[Way]]:
    """The ways to read each shard, less those in which a parameter has other neighbours than in what is certain.

    Of a neighbour its parameter's name is compared: a parameter that all tensor-parallel ranks have lies in buffers of
    them all, which are in one order, between other shards of the same neighbours.
    """
    while True:
        known = _Known(ways, pieces)
        kept = [[way for way in own if known.agrees(way)] for own in ways]
        if kept == ways:
            return ways
        ways = kept


def _name(piece: Piece) -> str:
    return piece.shard.parameter


def _neighbours(way: Way, pieces: list[Piece]) -> Iterator[tuple[int, int, int]]:
    """Parameters that lie right behind each other in a buffer, and how many elements of padding are in between."""
    for left, right in itertools.pairwise(way):
        end = left.begin + left.length
        if left.offset + left.length == pieces[left.piece].numel and right.offset == 0:
            yield left.piece, right.piece, right.begin - end


def _sure_neighbours(ways: list[list[Way]], pieces: list[Piece]) -> Iterator[tuple[int, int, int]]:
    for own in ways:
        if len(own) == 1:
            yield from _neighbours(own[0], pieces)


def _common(ways: list[Way]) -> Way:
    """What all ways to read a shard agree in."""
    return tuple(run for run in ways[0] if all(run in way for way in ways)) if ways else ()


def _own(piece: Piece, certain: dict[int, int]) -> Way:
    """The parameter's own elements alone, where it is certain how far they are shifted."""
    by = certain.get(piece.number)
    return () if by is None else (Run(0, piece.number, by, piece.numel - by),)


def shifts(ways: list[list[Way]], pieces: list[Piece], certain: dict[int, int]) -> tuple[int | None, ...]:
    """How far each shard is shifted, by itself or by its neighbours; None where that cannot be told.

    Padding between two parameters, or behind one that is not the last of all, is seen within a bucket only.
    """
    found = dict(certain)
    in_one_bucket = {
        (left, right)
        for left, right, gap in _sure_neighbours(ways, pieces)
        if gap or _name(pieces[left]) == _name(pieces[right])  # halves of one parameter
    }
    followed = {left for left, _ in in_one_bucket} | set(_with_a_gap_behind(ways, pieces))
    while True:
        told: dict[int, set[int | None]] = {piece.number: set() for piece in pieces}
        for left, right in in_one_bucket:
            for one, other in ((left, right), (right, left)):
                told[one] |= {found[other]} if other in found else set()
        for piece, own in zip(pieces, ways, strict=True):
            by = {_by_way(piece, way, found, is_followed=piece.number in followed) for way in own}
            told[piece.number] |= by if by != {None} else set()
        only = {number: by.copy().pop() for number, by in told.items() if len(by) == 1 and number not in found}
        new = {number: by for number, by in only.items() if by is not None}
        if not new:
            return tuple(found.get(piece.number) for piece in pieces)
        found |= new


def _with_a_gap_behind(ways: list[list[Way]], pieces: list[Piece]) -> Iterator[int]:
    """Parameters behind which there is padding up to the end of a saved shard."""
    for saved, own in zip(pieces, ways, strict=True):
        for last in (way[-1] for way in own if way and len(own) == 1):
            at_end = last.offset + last.length == pieces[last.piece].numel
            if at_end and last.begin + last.length < saved.numel:
                yield last.piece


def _by_way(piece: Piece, way: Way, found: dict[int, int], *, is_followed: bool) -> int | None:
    """How far a shard that is read in a way is shifted; None if the way does not tell."""
    if not way:
        return None
    first = way[0]
    if first.piece == piece.number:
        return first.offset
    by = found.get(first.piece)
    is_next = by is not None and first.begin - first.offset + by == piece.numel + piece.gap
    in_one_bucket = piece.gap == 0 or first.begin > 0 or is_followed
    return by if is_next and in_one_bucket else None


def _told(pieces: list[Piece], read: list[Way]) -> tuple[tuple[Move, ...], tuple[tuple[tuple[int, int], ...], ...]]:
    """From where each parameter gets its elements, and which of them are nowhere."""
    sources: list[list[Move]] = [[] for _ in pieces]
    for source, way in enumerate(read):
        for run in way:
            sources[run.piece].append(Move(source, run.begin, run.piece, run.offset, run.length))
    moves: list[Move] = []
    lost = []
    for piece, own in zip(pieces, sources, strict=True):
        kept = list(_without_contradictions(pieces, own))
        moves += kept
        lost.append(_rest(piece.numel, kept))
    return tuple(moves), tuple(lost)


def _without_contradictions(pieces: list[Piece], moves: list[Move]) -> Iterator[Move]:
    """Each element from one place; from none if it is found in several, and they differ.

    Tensor-parallel ranks have the same parameters in buffers of their own, and one of them saves its own.
    """
    edges = sorted({edge for move in moves for edge in (move.offset, move.offset + move.length)})
    for begin, end in itertools.pairwise(edges):
        parts = [
            Move(m.source, m.begin + begin - m.offset, m.target, begin, end - begin)
            for m in moves
            if m.offset <= begin and end <= m.offset + m.length
        ]
        if parts and all(_same_states(pieces, parts[0], part) for part in parts[1:]):
            yield min(parts, key=lambda part: part.source != part.target)


def _same_states(pieces: list[Piece], left: Move, right: Move) -> bool:
    return all(
        np.array_equal(
            *(pieces[m.source].state(role, m.begin, m.begin + m.length).view(np.uint32) for m in (left, right))
        )
        for role in (MASTER, *MOMENTS)
    )


def _rest(numel: int, moves: list[Move]) -> tuple[tuple[int, int], ...]:
    """The ranges of elements that no move has."""
    found, at = [], 0
    for move in sorted(moves, key=lambda move: move.offset):
        if move.offset > at:
            found.append((at, move.offset))
        at = move.offset + move.length
    return (*found, (at, numel)) if at < numel else tuple(found)
