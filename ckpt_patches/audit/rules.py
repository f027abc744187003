"""What no correct run can contain, as pure rules on the runs of odd elements of one shard.

Zeros are a lost slice only where the other arrays of the parameter contradict them, or where no rows or columns without
gradient have their shape. Rules of several shards are in `rules_across.py`.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ckpt_patches.audit.judging import blocks, few_bits, remainders
from ckpt_patches.audit.judging.scan import Odd, OddRuns, Tally, stretches
from ckpt_patches.formats import damages, elements
from ckpt_patches.formats.checkpoint import EXP_AVG, EXP_AVG_SQ, MASTER, MOMENTS, ROLES, WEIGHT, Checkpoint, Shard
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.zero_inventory import numbered

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
    runs: OddRuns
    is_cut: bool  # runs other than short zeros were dropped
    tallies: dict[int, Tally]
    found: Checkpoint
    repaired: frozenset[int] = field(default_factory=frozenset)  # edges of ranges that `ckpt-patches repair` wrote

    @property
    def least(self) -> int:
        """The fewest elements of a lost slice: in a bucket, more than any padding."""
        return LEAST if self.shard.has_rows else max(PADDING, ALIGNMENT * (self.found.data_parallel or 1))

    @property
    def has_moments(self) -> bool:
        return set(MOMENTS) <= self.shard.streams.keys()

    def finding(self, kind: damages.FindingKind, role: str, begin: int, end: int, detail: str = "") -> Finding:
        written = written_by(self.shard, begin, end, self.found.data_parallel)
        detail = ", ".join(filter(None, (detail, written)))
        return Finding(kind, self.shard.streams[role].array, detail, self.shard.label, begin, end)


def judge(shard: Shard, odd: Odd, found: Checkpoint) -> Iterator[Finding]:
    """The findings of a shard; none for padding, which can hold anything."""
    if shard.is_padding:
        return
    repaired = frozenset(edge for own in found.repaired_in(shard) for edge in own)
    seen = Seen(shard, odd.runs, odd.is_cut, odd.tallies, found, repaired)
    for rule in RULES:
        yield from _limited(list(rule(seen)))


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
            for bit in (blocks.MASKED, blocks.INFINITE):
                yield from _wrong(seen, damages.NOT_FINITE, role, bit)


def negative_square(seen: Seen) -> Iterator[Finding]:
    yield from _wrong(seen, damages.NEGATIVE_SQUARE, EXP_AVG_SQ, blocks.NEGATIVE)


# Rule 2: main parameters round to the weights


def unrounded_master(seen: Seen) -> Iterator[Finding]:
    """Main parameters that do not round to the weights. If most do not and are near, nothing tells which are wrong."""
    unrounded, zeros = (seen.tallies.get(bit) for bit in (blocks.UNROUNDED, blocks.NO_WEIGHT))
    if unrounded is None:
        return
    if remainders.are_in(seen.shard):
        detail = "whole numbers of 16 bits, what a bf16 weight lacks of its main parameter: nothing contradicts them"
        yield seen.finding(damages.NOT_JUDGED, MASTER, 0, seen.shard.numel, detail)
    elif 2 * unrounded.elements > seen.shard.numel and few_bits.are_near(seen.shard):
        if few_bits.are_in(seen.shard):
            yield seen.finding(damages.FEW_BITS, WEIGHT, 0, seen.shard.numel)
        else:
            detail = f"{unrounded.elements} of {seen.shard.numel} elements"
            yield seen.finding(damages.OTHER_MASTERS, MASTER, unrounded.begin, unrounded.end, detail)
    else:
        # If all other masters round to their weights, a reload did reach the masters, and the weights are lost.
        is_lost_weight = zeros is not None and unrounded.elements == zeros.elements
        kind = damages.LOST_WEIGHT if is_lost_weight else damages.UNROUNDED_MASTER
        yield from _wrong(seen, kind, MASTER, blocks.UNROUNDED)


def lost_master(seen: Seen) -> Iterator[Finding]:
    """The main parameter is zero, and the weight is not; without a weight, the moments are not."""
    if blocks.CONTRADICTED not in seen.tallies or remainders.are_in(seen.shard):
        return
    ranges = holes(seen.runs, blocks.NO_MASTER, seen.runs.code & blocks.CONTRADICTED > 0)
    if WEIGHT in seen.shard.streams and MASTER in seen.shard.streams:
        least = 1 if seen.shard.has_rows else seen.least
        lost = [(begin, end) for begin, end in ranges if end - begin >= least]
    else:
        lost = few(seen, ranges)
    role = MASTER if MASTER in seen.shard.streams else WEIGHT
    for begin, end in lost:
        if (begin, end) == (0, seen.shard.numel) and len(seen.shard.streams.keys() & {MASTER, WEIGHT}) == 1:
            yield seen.finding(damages.RARE, role, begin, end, ZERO_MASTER)
        else:
            yield seen.finding(damages.LOST_MASTER, role, begin, end)


# Rules 3 and 4: moments that are zero


def lost_moment(seen: Seen) -> Iterator[Finding]:
    """Exactly one moment is zero over a run."""
    if not seen.has_moments:
        return
    code = seen.runs.code
    if seen.found.beta1 != 0:  # else the first moment is the last gradient
        every = holes(seen.runs, blocks.NO_AVG, code & BOTH == blocks.NO_AVG)
        alone = few(seen, every)
        yield from _sparse(seen, EXP_AVG, every, alone)
        decayed = {own for own in alone if _has_decayed(seen, *own)}
        for begin, end in alone:
            if (begin, end) not in decayed:
                yield seen.finding(damages.LOST_MOMENT, EXP_AVG, begin, end)
        if decayed:
            detail = "the first moment has decayed to zero"
            yield seen.finding(damages.NO_GRADIENT, EXP_AVG, min(decayed)[0], max(decayed)[1], detail)
    every = holes(seen.runs, blocks.NO_SQ, code & blocks.AVG_IS_LARGE > 0)
    alone = few(seen, every)
    yield from _sparse(seen, EXP_AVG_SQ, every, alone)
    for begin, end in alone:
        yield seen.finding(damages.LOST_MOMENT, EXP_AVG_SQ, begin, end)


def _sparse(seen: Seen, role: str, every: list[Range], alone: list[Range]) -> Iterator[Finding]:
    """A note on zeros in too many places, unless all of them are rows."""
    row = seen.shard.row
    if len(every) > len(alone) and any(begin % row or end % row for begin, end in every):
        yield seen.finding(damages.SPARSE_MOMENT, role, every[0][0], every[-1][1], f"{len(every)} places")


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
    ranges = stretches(seen.runs, BOTH) if seen.has_moments else []
    if not ranges or ranges == [(0, seen.shard.numel)]:
        return  # the full shard: see rules_across
    natural = rows_or_columns(ranges, seen.shard.row, seen.repaired)
    for begin, end in few(seen, irregular(ranges, seen.shard.row, seen.repaired)):
        for role in MOMENTS if (begin, end) not in natural else ():
            yield seen.finding(damages.LOST_MOMENT, role, begin, end)
    if natural:
        elements = sum(end - begin for begin, end in natural)
        detail = f"{elements} elements in {len(natural)} places"
        yield seen.finding(damages.NO_GRADIENT, EXP_AVG, min(natural)[0], max(natural)[1], detail)


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

    Quantized or sparse moments have zeros in many places of all lengths.
    """
    most = SLICES_PER_RANK * (seen.found.data_parallel or 1)
    lengths = sorted(end - begin for begin, end in ranges)
    return [own for own in ranges if own[1] - own[0] >= seen.least and _as_long(seen, lengths, own) <= most]


def _as_long(seen: Seen, lengths: list[int], own: Range) -> int:
    """How many ranges are a quarter as long as this one, or longer; in a small shard, how many there are."""
    least = 1 if seen.shard.numel < SMALL else (own[1] - own[0]) // 4
    return len(lengths) - int(np.searchsorted(lengths, least))


def rows_or_columns(ranges: list[Range], row: int, known: frozenset[int] = frozenset()) -> set[Range]:
    """The ranges whose edges are those of rows, of columns that other ranges share, or known not to be of a loss."""
    begins, ends = (Counter(own[edge] % row for own in ranges) for edge in (0, 1))

    def is_natural(edge: int, shared: Counter[int]) -> bool:
        return edge % row == 0 or shared[edge % row] > 1 or edge in known

    return {own for own in ranges if is_natural(own[0], begins) and is_natural(own[1], ends)}


def irregular(ranges: list[Range], row: int, known: frozenset[int] = frozenset()) -> list[Range]:
    """The ranges whose edges are neither those of rows, nor of columns that are zero in two rows that follow.

    A mask that prunes elements at random leaves many of them, of which some share columns by chance.
    """
    every = {*ranges}
    twins = [own for own in ranges if every & {(own[0] + row, own[1] + row), (own[0] - row, own[1] - row)}]
    columns = {0, *(edge % row for own in twins for edge in own)}
    return [own for own in ranges if not all(edge % row in columns or edge in known for edge in own)]


# What was not judged


def not_judged(seen: Seen) -> Iterator[Finding]:
    streams = seen.shard.streams
    if MASTER in streams and WEIGHT in streams and not blocks.is_compared(streams[WEIGHT].dtype):
        detail = f"the model's weights are of torch.{streams[WEIGHT].dtype}, with which no master was compared"
        yield seen.finding(damages.NOT_JUDGED, WEIGHT, 0, seen.shard.numel, detail)
    for role in (MASTER, *MOMENTS):
        if role in streams and not elements.is_number(streams[role].dtype):
            detail = f"elements of torch.{streams[role].dtype}, which are no numbers by themselves"
            yield seen.finding(damages.NOT_JUDGED, role, 0, seen.shard.numel, detail)
    if seen.is_cut:
        detail = f"zeros in more places than are kept, {len(seen.runs.begin)}: the shorter ones were not judged"
        yield seen.finding(damages.NOT_JUDGED, next(iter(streams)), 0, seen.shard.numel, detail)


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
    if not seen.shard.has_rows:
        kind = damages.ODD_IN_BUCKET
    chosen = seen.runs.code & bit > 0
    begin, end = seen.runs.begin[chosen], seen.runs.end[chosen]
    if not len(begin):
        return
    tally, total = seen.tallies[bit], np.concatenate([[0], np.cumsum(end - begin)])
    if tally.elements != total[-1]:  # some runs were dropped
        yield seen.finding(kind, role, tally.begin, tally.end, f"{tally.elements} elements of these")
        return
    cuts = np.flatnonzero(begin[1:] - end[:-1] > NEAR) + 1
    if len(cuts) >= MOST_FINDINGS:
        cuts = cuts[:0]
    for first, last in zip([0, *cuts.tolist()], [*cuts.tolist(), len(begin)], strict=True):
        low, high, elements = int(begin[first]), int(end[last - 1]), int(total[last] - total[first])
        yield seen.finding(kind, role, low, high, "" if elements == high - low else f"{elements} elements of these")


def _limited(findings: list[Finding]) -> list[Finding]:
    """Merge the findings of a kind and array if there are too many to show."""
    by_array: dict[tuple[damages.FindingKind, str], list[Finding]] = {}
    for finding in findings:
        by_array.setdefault((finding.kind, finding.array), []).append(finding)
    return [finding for own in by_array.values() for finding in (own if len(own) <= MOST_FINDINGS else [_hull(own)])]


def _hull(findings: list[Finding]) -> Finding:
    last = max(finding.end or 0 for finding in findings)
    return replace(findings[0], end=last, detail=f"{len(findings)} places of these")
