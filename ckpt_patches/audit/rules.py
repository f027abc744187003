"""What no correct run can contain, as pure rules on the runs of odd elements of one shard.

Zeros are a lost slice only where the other arrays of the parameter contradict them, or where no rows or columns without
gradient have their shape. Rules of several shards are in `rules_across.py`.
"""

import bisect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckpt_patches.audit.judging import blocks, few_bits, remainders
from ckpt_patches.audit.judging.scan import Odd, OddRuns, stretches
from ckpt_patches.formats import damages, elements
from ckpt_patches.formats.checkpoint import EXP_AVG, EXP_AVG_SQ, MASTER, MOMENTS, ROLES, WEIGHT, Checkpoint, Shard
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.zero_inventory import numbered

ZERO = {EXP_AVG: blocks.NO_AVG, EXP_AVG_SQ: blocks.NO_SQ}
BOTH = blocks.NO_AVG | blocks.NO_SQ
LEAST = 4  # elements of a lost slice; fewer zeros also occur in a complete state
SLICES_PER_RANK = 2  # a write that is lost leaves one range, or two where it is between others
SMALL = 1 << 12  # elements
# Settings of Adam in torch, apex and Megatron, and of its relatives in torch. Other optimizers have other moments.
OF_ADAM = {"amsgrad", "bias_correction", "decoupled_weight_decay", "momentum_decay"}
DECAYED = 1e-30  # a first moment that has decayed by this factor may have become zero
# Megatron's buckets have padding with undefined content: after a parameter, and at the end.
PADDING, ALIGNMENT = 1024, 256  # elements; ALIGNMENT is per data-parallel rank
ZERO_MASTER = "all zeros, beside moments that are not: at a rate of 0, or in a first step, a run saves this"
OF_OPTIMIZER = re.compile(r"(?:^|[./])state[./]")  # in the name of a state, as torch's optimizers nest them
NEAR = 64  # elements: wrong elements at most this far apart are one range
MOST_FINDINGS = 1000  # of one kind in one array; more are merged
Range = tuple[int, int]


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


def judge(shard: Shard, odd: Odd, found: Checkpoint) -> Iterator[Finding]:
    """The findings of a shard; none for padding, which can hold anything."""
    for rule in () if shard.is_padding else RULES:
        yield from rule(Seen(shard, odd, found))


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


# Rule 1: NaN and infinity. A negative second moment


def not_finite(seen: Seen) -> Iterator[Finding]:
    """NaN or infinity in a tensor that has states, and NaN in the model's tensors."""
    if seen.shard.parameter in seen.found.neither:
        return
    for role in ROLES:
        yield from _wrong(seen, damages.NOT_FINITE, role, blocks.NOT_FINITE[role])
    # Without moments, infinity is a state, a trained weight, or the content of a buffer such as a mask.
    is_state = OF_OPTIMIZER.search(seen.shard.parameter) is not None and seen.shard.numel > 1
    is_buffer = seen.shard.parameter in seen.found.buffers
    if is_state or (MASTER in seen.shard.streams and not is_buffer):
        for role in seen.shard.streams:
            yield from _wrong(seen, damages.NOT_FINITE, role, blocks.INFINITE)


def negative_square(seen: Seen) -> Iterator[Finding]:
    yield from _wrong(seen, damages.NEGATIVE_SQUARE, EXP_AVG_SQ, blocks.NEGATIVE)


# Rule 2: main parameters round to the weights


def unrounded_master(seen: Seen) -> Iterator[Finding]:
    """Main parameters that do not round to the weights. If most do not and are near, nothing tells which are wrong."""
    unrounded, zeros = (seen.odd.tallies.get(bit) for bit in (blocks.UNROUNDED, blocks.NO_WEIGHT))
    if unrounded is None:
        return
    if remainders.are_in(seen.shard):
        detail = "whole numbers of 16 bits, what a bf16 weight lacks of its main parameter: nothing contradicts them"
        yield from seen.of_all(damages.NOT_JUDGED, MASTER, detail)
    elif 2 * unrounded.elements > seen.shard.numel and few_bits.are_near(seen.shard):
        if few_bits.are_in(seen.shard):
            yield from seen.of_all(damages.FEW_BITS, WEIGHT)
        else:
            detail = f"{unrounded.elements} of {seen.shard.numel} elements"
            yield from seen.findings(damages.OTHER_MASTERS, MASTER, [(unrounded.begin, unrounded.end)], detail)
    else:
        # If all other masters round to their weights, a reload did reach the masters, and the weights are lost.
        is_lost_weight = zeros is not None and unrounded.elements == zeros.elements
        kind = damages.LOST_WEIGHT if is_lost_weight else damages.UNROUNDED_MASTER
        yield from _wrong(seen, kind, MASTER, blocks.UNROUNDED)


def lost_master(seen: Seen) -> Iterator[Finding]:
    """The main parameter is zero, and the weight is not; without a weight, the moments are not."""
    if blocks.CONTRADICTED not in seen.odd.tallies or remainders.are_in(seen.shard):
        return
    ranges = holes(seen.odd.runs, blocks.NO_MASTER, seen.odd.runs.code & blocks.CONTRADICTED > 0)
    role, kind, detail = MASTER if MASTER in seen.shard.streams else WEIGHT, damages.LOST_MASTER, ""
    if {WEIGHT, MASTER} <= seen.shard.streams.keys():
        least = 1 if seen.shard.has_rows else seen.least
        ranges = [(begin, end) for begin, end in ranges if end - begin >= least]
    elif (ranges := few(seen, ranges)) == [(0, seen.shard.numel)]:
        kind, detail = damages.RARE, ZERO_MASTER
    yield from seen.findings(kind, role, ranges, detail)


# Rules 3 and 4: moments that are zero


def lost_moment(seen: Seen) -> Iterator[Finding]:
    """Exactly one moment is zero over a run. A note on zeros in more places than are lost, unless all of them are rows.

    The first moment can decay to zero; if its factor is 0, it is the last gradient.
    """
    code, row = seen.odd.runs.code, seen.shard.row
    certain = {EXP_AVG: code & BOTH == blocks.NO_AVG, EXP_AVG_SQ: code & blocks.AVG_IS_LARGE > 0}
    for role in MOMENTS if set(MOMENTS) <= seen.shard.streams.keys() else ():
        if role == EXP_AVG and seen.found.beta1 == 0:
            continue
        every = holes(seen.odd.runs, ZERO[role], certain[role])
        alone = few(seen, every)
        if len(every) > len(alone) and any(begin % row or end % row for begin, end in every):
            detail = f"{len(every)} places"
            yield from seen.findings(damages.SPARSE_MOMENT, role, [(every[0][0], every[-1][1])], detail)
        decayed = [own for own in alone if role == EXP_AVG and _has_decayed(seen, *own)]
        yield from seen.findings(damages.LOST_MOMENT, role, [own for own in alone if own not in decayed])
        if decayed:
            hull = decayed[0][0], decayed[-1][1]
            yield from seen.findings(damages.NO_GRADIENT, role, [hull], "the first moment has decayed to zero")


def _has_decayed(seen: Seen, begin: int, end: int) -> bool:
    """Whether a first moment of whole rows can be zero where its square is not: in time, or of another optimizer."""
    step, row = seen.found.step, seen.shard.row
    if begin % row or end % row:
        return False
    if any(not OF_ADAM & group.keys() for group in seen.found.groups if "betas" in group):
        return True  # ADOPT's first moment begins a step later than its square
    return step is None or float(seen.found.beta1 or 0.9) ** step < DECAYED


def lost_in_both(seen: Seen) -> Iterator[Finding]:
    """Both moments are zero, over runs that are neither rows nor columns that other rows share."""
    ranges = stretches(seen.odd.runs, BOTH) if set(MOMENTS) <= seen.shard.streams.keys() else []
    if not ranges or ranges == [(0, seen.shard.numel)]:
        return  # the full shard: see rules_across
    known = {edge for own in seen.found.repaired_in(seen.shard) for edge in own}  # not of a loss
    row, natural = seen.shard.row, rows_or_columns(ranges, seen.shard.row, known)
    # Of sparse moments most edges are those of other ranges, too, by chance: only rows are not counted.
    no_rows = [own for own in ranges if own[0] % row or own[1] % row]
    lost = few(seen, [own for own in ranges if own not in natural], no_rows)
    for role in MOMENTS:
        yield from seen.findings(damages.LOST_MOMENT, role, lost)
    if natural:
        elements = sum(end - begin for begin, end in natural)
        detail = f"{elements} elements in {len(natural)} places"
        hull = min(natural)[0], max(natural)[1]
        yield from seen.findings(damages.NO_GRADIENT, EXP_AVG, [hull], detail)


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


def few(seen: Seen, ranges: list[Range], among: list[Range] | None = None) -> list[Range]:
    """The ranges that can be lost slices: those of which a data-parallel rank can have lost that many.

    Quantized or sparse moments have zeros in many places of all lengths. Counted are the ranges of `among` (by default
    all) that are a quarter as long, or longer; in a small shard, all of them.
    """
    most = SLICES_PER_RANK * (seen.found.data_parallel or 1)
    lengths = sorted(end - begin for begin, end in (ranges if among is None else among))
    found = []
    for begin, end in ranges:
        least = 1 if seen.shard.numel < SMALL else (end - begin) // 4
        if end - begin >= seen.least and len(lengths) - bisect.bisect_left(lengths, least) <= most:
            found.append((begin, end))
    return found


def rows_or_columns(ranges: list[Range], row: int, known: Set[int] = frozenset()) -> set[Range]:
    """The ranges whose edges are those of rows, of columns that other ranges share, or known not to be of a loss."""
    begins, ends = (Counter(own[edge] % row for own in ranges) for edge in (0, 1))

    def is_natural(edge: int, shared: Counter[int]) -> bool:
        return edge % row == 0 or shared[edge % row] > 1 or edge in known

    return {own for own in ranges if is_natural(own[0], begins) and is_natural(own[1], ends)}


# What was not judged


def not_judged(seen: Seen) -> Iterator[Finding]:
    streams = seen.shard.streams
    if MASTER in streams and WEIGHT in streams and not blocks.is_compared(streams[WEIGHT].dtype):
        detail = f"the model's weights are of torch.{streams[WEIGHT].dtype}, with which no master was compared"
        yield from seen.of_all(damages.NOT_JUDGED, WEIGHT, detail)
    for role in (MASTER, *MOMENTS):
        if role in streams and not elements.is_number(streams[role].dtype):
            detail = f"elements of torch.{streams[role].dtype}, which are no numbers by themselves"
            yield from seen.of_all(damages.NOT_JUDGED, role, detail)
    if seen.odd.is_cut:
        detail = f"zeros in more places than are kept, {len(seen.odd.runs.begin)}: the shorter ones were not judged"
        yield from seen.of_all(damages.NOT_JUDGED, next(iter(streams)), detail)


RULES: tuple[Callable[[Seen], Iterator[Finding]], ...] = (
    lost_master,
    lost_moment,
    lost_in_both,
    unrounded_master,
    not_finite,
    negative_square,
    not_judged,
)


def _wrong(seen: Seen, kind: damages.FindingKind, role: str, bit: int) -> Iterator[Finding]:
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
