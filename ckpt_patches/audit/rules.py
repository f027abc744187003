"""What no correct run can contain, as pure rules: on the odd elements of one shard, and on all shards of a checkpoint.

Zeros are a lost slice only where the other arrays of the parameter contradict them, or where no rows or columns without
gradient have their shape.
"""

import bisect
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_patches.audit.judging import blocks, masters
from ckpt_patches.audit.judging.scan import Odd, stretches
from ckpt_patches.audit.ranges import Range
from ckpt_patches.formats import damages, elements
from ckpt_patches.formats.checkpoint import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    MOMENTS,
    ROLES,
    WEIGHT,
    Checkpoint,
    Owner,
    Shard,
    Stream,
)
from ckpt_patches.formats.damages import Finding, FindingKind
from ckpt_patches.formats.dtypes import FLOATS
from ckpt_patches.formats.zero_inventory import numbered

LEAST = 4  # elements of a lost slice; fewer zeros also occur in a complete state
SLICES_PER_RANK = 2  # a write that is lost leaves one range, or two where it is between others
SMALL = 1 << 12  # elements
EXACT = ("float32", "float64")  # dtypes of moments that are zero in time alone, and not by rounding
# Megatron's buckets have padding with undefined content: after a parameter, and at the end.
PADDING, ALIGNMENT = 1024, 256  # elements; ALIGNMENT is per data-parallel rank
GAP = 64  # elements: each parameter begins at a multiple of it, so those are no padding between two
NEAR = 64  # elements: wrong elements at most this far apart are one range
MOST_FINDINGS = 1000  # of one kind in one array; more are merged
ZERO = {EXP_AVG: blocks.NO_AVG, EXP_AVG_SQ: blocks.NO_SQ}
BOTH = blocks.NO_AVG | blocks.NO_SQ
# Settings of Adam in torch, apex and Megatron, and of its relatives in torch. Other optimizers have other moments.
OF_ADAM = {"amsgrad", "bias_correction", "decoupled_weight_decay", "momentum_decay"}
DECAYED = 1e-30  # a first moment that has decayed by this factor may have become zero
SHIFTABLE = "optimizer.state.param."  # in the names of arrays; chained optimizers add a prefix
ZERO_MASTER = "all zeros, beside moments that are not: at a rate of 0, or in a first step, a run saves this"
OF_OPTIMIZER = re.compile(r"(?:^|[./])state[./]")  # in the name of a state, as torch's optimizers nest them
# Names of the scales of a state of 8 bits, in bitsandbytes and torchao, or of a state that is too small for it.
SCALES = re.compile(r"\.((absmax|state)[12]|scale)$")


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

    def findings(self, kind: FindingKind, role: str, ranges: list[Range], detail: str = "") -> Iterator[Finding]:
        """A finding for each range, or for all of them if they are too many to show."""
        if len(ranges) > MOST_FINDINGS:
            ranges, detail = [(ranges[0][0], ranges[-1][1])], f"{len(ranges)} places of these"
        for begin, end in ranges:
            own = ", ".join(filter(None, (detail, written_by(self.shard, begin, end, self.found.data_parallel))))
            yield Finding(kind, self.shard.streams[role].array, own, self.shard.label, begin, end)

    def hull(self, kind: FindingKind, role: str, ranges: list[Range] | None = None, detail: str = "") -> Finding:
        """One finding, of all elements or from the first to the last of the ranges."""
        begin, end = (ranges[0][0], ranges[-1][1]) if ranges else (0, self.shard.numel)
        return next(self.findings(kind, role, [(begin, end)], detail))

    def wrong(self, kind: FindingKind, role: str, bit: int) -> Iterator[Finding]:
        """Findings for the elements with a bit; nearby elements form one range."""
        if (tally := self.odd.tallies.get(bit)) is None:
            return
        kind = kind if self.shard.has_rows else damages.ODD_IN_BUCKET
        own = self.odd.chosen(self.odd.code & bit > 0)
        cuts = np.flatnonzero(own.begin[1:] - own.end[:-1] > NEAR) + 1
        if tally.elements != (own.end - own.begin).sum() or len(cuts) >= MOST_FINDINGS:  # dropped, or many
            yield self.hull(kind, role, [tally[1:]], f"{tally.elements} elements of these")
            return
        for first, last in zip(np.split(own.begin, cuts), np.split(own.end, cuts), strict=True):
            low, high, count = int(first[0]), int(last[-1]), int((last - first).sum())
            detail = "" if count == high - low else f"{count} elements of these"
            yield self.hull(kind, role, [(low, high)], detail)


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


def judge(shard: Shard, odd: Odd, found: Checkpoint) -> Iterator[Finding]:
    """The findings of a shard; none for padding, which can hold anything."""
    if not shard.is_padding:
        seen = Seen(shard, odd, found)
        yield from lost_master(seen)
        if set(MOMENTS) <= shard.streams.keys():
            yield from lost_moment(seen)
            yield from lost_in_both(seen)
        yield from unrounded_master(seen)
        yield from not_finite(seen)
        yield from seen.wrong(damages.NEGATIVE_SQUARE, EXP_AVG_SQ, blocks.NEGATIVE)
        yield from not_judged(seen)


# Rule 1: NaN and infinity


def not_finite(seen: Seen) -> Iterator[Finding]:
    """NaN or infinity in a tensor that has states, and NaN in the model's tensors."""
    shard, found = seen.shard, seen.found
    if shard.parameter in found.neither:
        return
    for role in ROLES:
        yield from seen.wrong(damages.NOT_FINITE, role, blocks.NOT_FINITE[role])
    # Without moments, infinity is a state, a trained weight, or the content of a buffer such as a mask.
    is_state = OF_OPTIMIZER.search(shard.parameter) is not None and shard.numel > 1
    if is_state or (MASTER in shard.streams and shard.parameter not in found.buffers):
        for role in shard.streams:
            yield from seen.wrong(damages.NOT_FINITE, role, blocks.INFINITE)


# Rule 2: main parameters round to the weights


def unrounded_master(seen: Seen) -> Iterator[Finding]:
    """Main parameters that do not round to the weights. If most do not and are near, nothing tells which are wrong."""
    unrounded, zeros = (seen.odd.tallies.get(bit) for bit in (blocks.UNROUNDED, blocks.NO_WEIGHT))
    if unrounded is None:
        return
    if masters.are_remainders(seen.shard):
        detail = "whole numbers of 16 bits, what a bf16 weight lacks of its main parameter: nothing contradicts them"
        yield seen.hull(damages.NOT_JUDGED, MASTER, detail=detail)
    elif 2 * unrounded.elements > seen.shard.numel and masters.are_near(seen.shard):
        if masters.have_few_bits(seen.shard):
            yield seen.hull(damages.FEW_BITS, WEIGHT)
        else:
            detail = f"{unrounded.elements} of {seen.shard.numel} elements"
            yield seen.hull(damages.OTHER_MASTERS, MASTER, [(unrounded.begin, unrounded.end)], detail)
    else:
        # If all other masters round to their weights, a reload did reach the masters, and the weights are lost.
        is_lost_weight = zeros is not None and unrounded.elements == zeros.elements
        kind = damages.LOST_WEIGHT if is_lost_weight else damages.UNROUNDED_MASTER
        yield from seen.wrong(kind, MASTER, blocks.UNROUNDED)


def lost_master(seen: Seen) -> Iterator[Finding]:
    """The main parameter is zero, and the weight is not; without a weight, the moments are not."""
    if blocks.CONTRADICTED not in seen.odd.tallies or masters.are_remainders(seen.shard):
        return
    ranges = holes(seen.odd, blocks.NO_MASTER, seen.odd.code & blocks.CONTRADICTED > 0)
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
    code, row = seen.odd.code, seen.shard.row
    is_no_gap = _reach_parameters(seen.shard, seen.odd.begin, seen.odd.end)
    certain = {
        EXP_AVG: (code & BOTH == blocks.NO_AVG) & is_no_gap,
        EXP_AVG_SQ: (code & blocks.AVG_IS_LARGE > 0) & is_no_gap,
    }
    for role in (EXP_AVG_SQ,) if seen.found.beta1 == 0 else MOMENTS:
        every = holes(seen.odd, ZERO[role], certain[role])
        alone = few(seen, every)
        if len(every) > len(alone) and any(begin % row or end % row for begin, end in every):
            yield seen.hull(damages.SPARSE_MOMENT, role, every, f"{len(every)} places")
        decayed = [own for own in alone if role == EXP_AVG and _has_decayed(seen, *own)]
        yield from seen.findings(damages.LOST_MOMENT, role, [own for own in alone if own not in decayed])
        if decayed:
            yield seen.hull(damages.NO_GRADIENT, role, decayed, "the first moment has decayed to zero")


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
    ranges = stretches(seen.odd, BOTH)
    if not ranges or ranges == [(0, seen.shard.numel)]:
        return  # the full shard: see `of_moments`
    known = {edge for own in seen.found.repaired_in(seen.shard) for edge in own}  # not of a loss
    odd = irregular(ranges, seen.shard.row, known)
    lost = few(seen, odd)
    for role in MOMENTS:
        yield from seen.findings(damages.LOST_MOMENT, role, lost)
    if natural := sorted({*ranges} - {*odd}):
        elements = sum(end - begin for begin, end in natural)
        yield seen.hull(damages.NO_GRADIENT, EXP_AVG, natural, f"{elements} elements in {len(natural)} places")


# What was not judged


def not_judged(seen: Seen) -> Iterator[Finding]:
    streams = seen.shard.streams
    if MASTER in streams and WEIGHT in streams and not blocks.is_compared(streams[WEIGHT].dtype):
        detail = f"the model's weights are of torch.{streams[WEIGHT].dtype}, with which no master was compared"
        yield seen.hull(damages.NOT_JUDGED, WEIGHT, detail=detail)
    for role in (MASTER, *MOMENTS):
        if role in streams and not elements.is_number(streams[role].dtype):
            detail = f"elements of torch.{streams[role].dtype}, which are no numbers by themselves"
            yield seen.hull(damages.NOT_JUDGED, role, detail=detail)
    if seen.odd.is_cut:
        detail = f"zeros in more places than are kept, {len(seen.odd.begin)}: the shorter ones were not judged"
        yield seen.hull(damages.NOT_JUDGED, next(iter(streams)), detail=detail)


# Ranges of odd elements


def _reach_parameters(shard: Shard, begin: "npt.NDArray[np.int64]", end: "npt.NDArray[np.int64]") -> Any:
    """Whether each range has an element that is not between two parameters of a bucket."""
    at = sum(shard.begin)  # of the shard in its bucket
    return np.full(len(begin), True) if shard.has_rows else -(-(begin + at) // GAP) * GAP < end + at


def holes(odd: Odd, bits: int, certain: npt.NDArray[np.bool_]) -> list[Range]:
    """In each run of zeros (`bits`), the range from the first to the last element that cannot be zero (`certain`)."""
    wrong = odd.chosen(certain)
    places = np.searchsorted(wrong.begin, stretches(odd, bits)).reshape(-1, 2)
    return [(int(wrong.begin[first]), int(wrong.end[last - 1])) for first, last in places if first < last]


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


def irregular(ranges: list[Range], row: int, known: set[int]) -> list[Range]:
    """The ranges whose edges are neither those of rows, nor of columns that are zero in two rows that follow.

    A mask that prunes elements at random leaves many of them, of which some share columns by chance.
    """
    every = {*ranges}
    twins = [own for own in ranges if every & {(own[0] + row, own[1] + row), (own[0] - row, own[1] - row)}]
    columns = {0, *(edge % row for own in twins for edge in own)}
    return [own for own in ranges if not all(edge % row in columns or edge in known for edge in own)]


# Rules 3 and 4 on several shards: what a rank, a file or every parameter has lost. Rule 5: steps beside moments


@dataclass(frozen=True)
class Part:
    """What one rank holds of a shard."""

    shard: Shard
    rank: str  # empty if unknown
    begin: int
    end: int
    is_zero: bool  # whether both moments of all its elements are zero
    is_trained: bool  # whether it has moments that are not zero; in a bucket, such as cannot be padding

    @property
    def parameter(self) -> str:
        """Its name. Each expert-parallel rank has other experts under the same name."""
        own = self.shard
        return f"{own.parameter} {own.label}" if "expert" in own.label else own.parameter


def parts_of(shard: Shard, runs: Odd, found: Checkpoint) -> list[Part]:
    """The parts of a shard by rank, or one part; none if it has no moments."""
    if not set(MOMENTS) <= shard.streams.keys() or shard.is_padding:
        return []
    seen, zeros = Seen(shard, runs, found), stretches(runs, BOTH)
    parts = []
    for own in (own for own in shard.owners if own.end > own.begin):
        is_zero = any(begin <= own.begin and own.end <= end for begin, end in zeros)
        parts.append(Part(shard, *own, is_zero, not is_zero and _is_trained(seen, own, zeros)))
    return parts


def _is_trained(seen: Seen, own: Owner, zeros: list[Range]) -> bool:
    """Whether moments that are not zero are those of a parameter: in a bucket, the rest and the end can be padding."""
    inner = [(max(begin, own.begin), min(end, own.end)) for begin, end in zeros if begin < own.end and own.begin < end]
    edges = np.array([own.begin, *(edge for zero in inner for edge in zero), own.end])
    begin, end = edges[::2], edges[1::2]
    is_no_end = (end < seen.shard.numel) | (end - begin >= seen.least)
    return seen.shard.has_rows or bool((_reach_parameters(seen.shard, begin, end) & is_no_end & (begin < end)).any())


def scales_of(shard: Shard, runs: Odd) -> list[Part]:
    """The shard as a part, by its file, if it is the scales of a state of 8 bits, or a state in place of one."""
    is_state = SCALES.search(shard.parameter) and OF_OPTIMIZER.search(shard.parameter)
    if not is_state or shard.streams.keys() != {WEIGHT} or shard.streams[WEIGHT].dtype not in FLOATS:
        return []
    file = Path(shard.streams[WEIGHT].extents[0].path).name
    is_zero = stretches(runs, blocks.NO_MASTER) == [(0, shard.numel)]
    return [Part(shard, file, 0, shard.numel, is_zero, not is_zero)]


def of_scales(parts: list[Part]) -> Iterator[Finding]:
    """Scales that are zero in all states of a file: so are the states."""
    for own in _by_rank(parts):
        if all(part.is_zero for part in own):
            detail = f"all {len(own)} scales of the optimizer's states are zero, and so are the states"
            yield Finding(damages.UNUSUAL, own[0].rank, detail=detail)


def of_zero_masters(found: Checkpoint, findings: list[Finding]) -> Iterator[Finding]:
    """The findings; a main parameter that is zero only in some shards becomes `LOST_MASTER`."""
    counts = Counter(shard.streams[MASTER].array for shard in found.shards if MASTER in shard.streams)
    zeros = Counter(finding.array for finding in findings if finding.detail.startswith(ZERO_MASTER))
    for finding in findings:
        if finding.detail.startswith(ZERO_MASTER) and zeros[finding.array] < counts[finding.array]:
            yield replace(finding, kind=damages.LOST_MASTER, detail="all zeros, and the other shards are not")
        else:
            yield finding


def of_shifted_states(found: Checkpoint, findings: list[Finding]) -> list[Finding]:
    """The findings; main parameters that do not round are called shifted where a shift leaves such findings.

    It concerns all parameters behind the first padded bucket of a buffer, and leaves zeros at the end of the last one.
    """
    wrong, zero = (damages.UNROUNDED_MASTER, damages.OTHER_MASTERS), (damages.LOST_MASTER, damages.LOST_WEIGHT)
    own = [f for f in findings if SHIFTABLE in f.array] if found.sharding in ("", "fully_reshardable") else []
    if not any(f.kind in wrong for f in own) or not any(f.kind in zero for f in own):
        return findings
    return [replace(f, kind=damages.SHIFTED_STATE) if f in own and f.kind in wrong else f for f in findings]


def of_sparse_moments(found: Checkpoint, findings: list[Finding]) -> list[Finding]:
    """The findings; lost slices are sparse moments if they can be of rounding, as moments of most other shards are."""
    natural = set[int]()
    for role in MOMENTS:
        shards = {(s.array, shard.label): shard for shard in found.shards if (s := shard.streams.get(role))}
        lost, sparse = (
            [f for f in findings if f.kind is kind and (f.array, f.shard) in shards]
            for kind in (damages.LOST_MOMENT, damages.SPARSE_MOMENT)
        )
        places = {(f.array, f.shard) for f in lost}
        others = {(f.array, f.shard) for f in sparse} - places if lost else ()
        if sum(_is_of_few_bits(shards[place].streams[role]) for place in others) >= len(places):
            natural |= {id(f) for f in lost if _may_be_rounded(f, shards[f.array, f.shard], role)}
    return [replace(f, kind=damages.SPARSE_MOMENT) if id(f) in natural else f for f in findings]


def _is_of_few_bits(moment: Stream) -> bool:
    return moment.dtype not in EXACT or masters.was_of_8_bits(moment, if_few=False)


def _may_be_rounded(zeros: Finding, shard: Shard, role: str) -> bool:
    """Whether rounding can leave these zeros: a run in a small shard of a rounded dtype; or, of what was of 8 bits, a
    run in any small shard, or rows.
    """
    moment, is_small = shard.streams[role], shard.numel < SMALL
    if is_small and moment.dtype not in EXACT:
        return True
    are_rows = shard.row > 1 and not (zeros.begin or 0) % shard.row and not (zeros.end or 0) % shard.row
    return (is_small or are_rows) and masters.was_of_8_bits(moment, if_few=True)


def of_moments(found: Checkpoint, parts: list[Part]) -> Iterator[Finding]:
    """Findings for moments that are zero in a parameter, on a rank or everywhere, or not zero at step 0."""
    if found.step == 0:
        if places := sum(part.is_trained for part in parts):
            found.step = None
            yield _at_step_0(found, f"moments that are not zero in {places} places, and ")
        return
    with_moments: dict[str, set[str]] = {part.parameter: set() for part in parts}  # by parameter, the ranks
    for part in (part for part in parts if not part.is_zero):
        with_moments[part.parameter].add(part.rank)
    if found.step is not None and parts and not any(with_moments.values()):
        yield from _zeros(damages.NO_MOMENTS, parts, f"step {found.step}")
        return
    lost = {own[0].rank for own in _by_rank(parts) if _is_lost(own, with_moments)}
    for part in (part for part in parts if part.is_zero):
        if part.rank in lost:
            yield from _zeros(damages.LOST_MOMENT, [part], f"as all that {part.rank} holds")
        elif not with_moments[part.parameter]:
            yield from _zeros(damages.PARAMETER_WITHOUT_MOMENTS, [part], f"step {found.step}")


def _by_rank(parts: Iterable[Part]) -> Iterable[list[Part]]:
    found: dict[str, list[Part]] = {}
    for part in parts:
        if part.rank:
            found.setdefault(part.rank, []).append(part)
    return found.values()


def _is_lost(own: list[Part], with_moments: dict[str, set[str]]) -> bool:
    """Whether a rank has no moments in most of its parameters, and other ranks have some of the same parameters.

    Unseen tokens, experts and units leave a rank without moments in a few parameters.
    """
    names = {part.parameter for part in own}
    zero = names - {part.parameter for part in own if not part.is_zero}
    shared = {name for name in zero if any(rank != own[0].rank for rank in with_moments[name])}
    return (len(shared) > 1 and 2 * len(zero) > len(names)) or (len(shared) > 0 and len(zero) == len(names) > 1)


def _zeros(kind: FindingKind, parts: Iterable[Part], detail: str) -> Iterator[Finding]:
    for part in parts:
        for role in MOMENTS:
            yield Finding(kind, part.shard.streams[role].array, detail, part.shard.label, part.begin, part.end)


def _at_step_0(found: Checkpoint, detail: str) -> Finding:
    """Moments although the step is 0, or although no file has a step."""
    if found.format.startswith("megatron") and all(group.get("step") is None for group in found.groups):
        return Finding(damages.UNUSUAL, "param_groups", detail=f"{detail}no step: a load counts from 0")
    return Finding(damages.CONTRADICTION, "the optimizer's step", detail=f"{detail}step 0: a load counts from there")
