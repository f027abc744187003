"""Detect checkpoints in which megatron-core 0.15.0 and later saved the optimizer state shifted.

`fully_reshardable` slices each parameter's state at an offset that includes the padding at the end of each bucket, from
a buffer without that padding. So a parameter gets the state that lies k elements after its own start, where k is all
padding before it: its own elements from k on, then zeros that align the next parameter, then that parameter's first
elements, or zeros after the buffer's end. https://github.com/NVIDIA/Megatron-LM/pull/5077

The layout of the buffer is not in the checkpoint. But the main parameters round to the weights, which identifies the
owner of each saved element. The search finds all possible layouts of a shard. If there is one, it is certain; if there
are several, only the runs that they share are.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ckpt_patches.audit.judging.shift_search import SIZES, Candidate, Piece, Reader, Run, certain_shift, forget
from ckpt_patches.audit.ranges import gaps, joined
from ckpt_patches.formats import damages
from ckpt_patches.formats.checkpoint import MASTER, MOMENTS, WEIGHT, Checkpoint, Shard
from ckpt_patches.formats.damages import Finding

TYPE = "fully_reshardable"
MASTERS = "optimizer.state.param."  # chained optimizers add a prefix

# Findings that a shift causes when each shard is judged by itself.
EXPLAINED = (
    damages.UNROUNDED_MASTER,
    damages.LOST_WEIGHT,
    damages.LOST_MASTER,
    damages.LOST_MOMENT,
    damages.OTHER_MASTERS,
    damages.RARE,
    damages.PARAMETER_WITHOUT_MOMENTS,
    damages.NO_GRADIENT,
)


@dataclass(frozen=True)
class Move:
    """Elements of all three states: where they lie and where they belong. Shards are numbers."""

    source: int
    begin: int
    target: int
    offset: int
    length: int


@dataclass(frozen=True)
class Shift:
    """The shift of a checkpoint."""

    shards: tuple[Shard, ...]
    by: tuple[int | None, ...]  # elements, per shard; None: unknown
    moves: tuple[Move, ...]  # including elements that are in their place
    lost: tuple[tuple[tuple[int, int], ...], ...]  # per shard, the ranges that are in no file, or not certainly


def explained(found: Checkpoint, findings: list[Finding]) -> tuple[list[Finding], Shift | None]:
    """Replace the findings that a shift explains. Returns the findings, and the shift if there is one."""
    suspect = {damages.UNROUNDED_MASTER, damages.OTHER_MASTERS, damages.LOST_WEIGHT, damages.LOST_MASTER}
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
    undetermined = [_undetermined(shard) for shard in found.shards if _has_states(shard) and not _is_complete(shard)]
    kept = [f for f in findings if f.kind not in EXPLAINED or (f.array, f.shard) not in concerned]
    return [*_findings(shift), *undetermined, *kept], shift


def _has_states(shard: Shard) -> bool:
    return MASTER in shard.streams and MASTERS in shard.streams[MASTER].array and shard.numel > 0


def _undetermined(shard: Shard) -> Finding:
    """The finding for a shard that cannot be compared, in a checkpoint where others are shifted."""
    what = {role: shard.streams[role].dtype if role in shard.streams else "none" for role in (WEIGHT, MASTER, *MOMENTS)}
    types = ", ".join(f"{role} {dtype}" for role, dtype in what.items())
    detail = f"whether it is shifted could not be told: other arrays or types than are compared ({types})"
    return Finding(damages.SHIFTED_STATE, shard.streams[MASTER].array, detail, shard.label, 0, shard.numel)


def _is_complete(shard: Shard) -> bool:
    """Whether a shard has the arrays, in the dtypes, that identify the owners of its elements."""
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
        yield Finding(damages.SHIFTED_STATE, shard.streams[MASTER].array, detail, shard.label, 0, shard.numel)


def find(shards: list[Shard]) -> Shift | None:
    """The shift of each shard and the owners of its elements; None if no shard is certainly shifted."""
    pieces = [Piece(number, shard) for number, shard in enumerate(shards)]
    found = ((piece.number, certain_shift(piece)) for piece in pieces)
    certain = {number: by for number, by in found if by is not None}
    if not any(certain.values()):
        return None
    reader = Reader(pieces, certain)
    candidates = consistent([reader.candidates(piece) for piece in pieces], pieces)
    if not any(by and candidates[number] for number, by in certain.items()):
        return None  # what follows its own elements belongs to no other parameter
    read = [_common(own) or _own(piece, certain) for piece, own in zip(pieces, candidates, strict=True)]
    moves, lost = _decided(pieces, read)
    return Shift(tuple(shards), shifts(candidates, pieces, certain), moves, lost)


class _Known:
    """The neighbors of parameters, from the shards that have one possible layout."""

    def __init__(self, candidates: list[list[Candidate]], pieces: list[Piece]) -> None:
        self.pieces = pieces
        self.before: dict[int, set[str]] = {}
        self.behind: dict[int, set[str]] = {}
        for left, right, _ in _sure_neighbours(candidates, pieces):
            self.before.setdefault(right, set()).add(_name(pieces[left]))
            self.behind.setdefault(left, set()).add(_name(pieces[right]))

    def agrees(self, candidate: Candidate) -> bool:
        for left, right, _ in _neighbours(candidate, self.pieces):
            names = _name(self.pieces[left]), _name(self.pieces[right])
            if names[0] not in self.before.get(right, names) or names[1] not in self.behind.get(left, names):
                return False
        return True


def consistent(candidates: list[list[Candidate]], pieces: list[Piece]) -> list[list[Candidate]]:
    """The layouts of each shard, without those in which a parameter has other neighbors than in a certain layout.

    Neighbors are compared by name: a parameter that all tensor-parallel ranks have lies in all their buffers, in the
    same order, between other shards of the same neighbors.
    """
    while True:
        known = _Known(candidates, pieces)
        kept = [[candidate for candidate in own if known.agrees(candidate)] for own in candidates]
        if kept == candidates:
            return candidates
        candidates = kept


def _name(piece: Piece) -> str:
    return piece.shard.parameter


def _neighbours(candidate: Candidate, pieces: list[Piece]) -> Iterator[tuple[int, int, int]]:
    """Pairs of adjacent parameters in a buffer, and the elements of padding between them."""
    for left, right in itertools.pairwise(candidate):
        end = left.begin + left.length
        if left.offset + left.length == pieces[left.piece].numel and right.offset == 0:
            yield left.piece, right.piece, right.begin - end


def _sure_neighbours(candidates: list[list[Candidate]], pieces: list[Piece]) -> Iterator[tuple[int, int, int]]:
    for own in candidates:
        if len(own) == 1:
            yield from _neighbours(own[0], pieces)


def _common(candidates: list[Candidate]) -> Candidate:
    """The runs that all layouts of a shard share."""
    return (
        tuple(run for run in candidates[0] if all(run in candidate for candidate in candidates)) if candidates else ()
    )


def _own(piece: Piece, certain: dict[int, int]) -> Candidate:
    """Only the parameter's own elements, if their shift is certain; else empty."""
    by = certain.get(piece.number)
    return () if by is None else (Run(0, piece.number, by, piece.numel - by),)


def shifts(candidates: list[list[Candidate]], pieces: list[Piece], certain: dict[int, int]) -> tuple[int | None, ...]:
    """The shift of each shard, from itself or its neighbors; None if unknown.

    Padding between two parameters, or after one that is not the last of all, occurs only within a bucket.
    """
    found = dict(certain)
    in_one_bucket = {
        (left, right)
        for left, right, gap in _sure_neighbours(candidates, pieces)
        if gap or _name(pieces[left]) == _name(pieces[right])  # halves of one parameter
    }
    followed = {left for left, _ in in_one_bucket} | set(_with_a_gap_behind(candidates, pieces))
    while True:
        told: dict[int, set[int | None]] = {piece.number: set() for piece in pieces}
        for left, right in in_one_bucket:
            for one, other in ((left, right), (right, left)):
                told[one] |= {found[other]} if other in found else set()
        for piece, own in zip(pieces, candidates, strict=True):
            by = {_by_candidate(piece, candidate, found, is_followed=piece.number in followed) for candidate in own}
            told[piece.number] |= by if by != {None} else set()
        only = {number: by.copy().pop() for number, by in told.items() if len(by) == 1 and number not in found}
        new = {number: by for number, by in only.items() if by is not None}
        if not new:
            return tuple(found.get(piece.number) for piece in pieces)
        found |= new


def _with_a_gap_behind(candidates: list[list[Candidate]], pieces: list[Piece]) -> Iterator[int]:
    """Parameters that are followed by padding up to the end of a saved shard."""
    for saved, own in zip(pieces, candidates, strict=True):
        for last in (candidate[-1] for candidate in own if candidate and len(own) == 1):
            at_end = last.offset + last.length == pieces[last.piece].numel
            if at_end and last.begin + last.length < saved.numel:
                yield last.piece


def _by_candidate(piece: Piece, candidate: Candidate, found: dict[int, int], *, is_followed: bool) -> int | None:
    """The shift of a shard with this layout; None if the layout does not determine it."""
    if not candidate:
        return None
    first = candidate[0]
    if first.piece == piece.number:
        return first.offset
    by = found.get(first.piece)
    is_next = by is not None and first.begin - first.offset + by == piece.numel + piece.gap
    in_one_bucket = piece.gap == 0 or first.begin > 0 or is_followed
    return by if is_next and in_one_bucket else None


def _decided(
    pieces: list[Piece], read: list[Candidate]
) -> tuple[tuple[Move, ...], tuple[tuple[tuple[int, int], ...], ...]]:
    """The sources of each parameter's elements, and the ranges without a source."""
    sources: list[list[Move]] = [[] for _ in pieces]
    for source, candidate in enumerate(read):
        for run in candidate:
            sources[run.piece].append(Move(source, run.begin, run.piece, run.offset, run.length))
    moves: list[Move] = []
    lost = []
    for piece, own in zip(pieces, sources, strict=True):
        kept = list(_without_contradictions(pieces, own))
        moves += kept
        lost.append(tuple(gaps(0, piece.numel, joined((move.offset, move.offset + move.length) for move in kept))))
    return tuple(moves), tuple(lost)


def _without_contradictions(pieces: list[Piece], moves: list[Move]) -> Iterator[Move]:
    """One source for each element; none if its sources differ.

    Tensor-parallel ranks have the same parameters in their own buffers, and one of them saves its copy.
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
