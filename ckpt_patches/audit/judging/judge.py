"""Convert the odd elements of a shard to findings, with a function for each kind of damage."""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from ckpt_patches.audit import damages
from ckpt_patches.audit.damages import Finding
from ckpt_patches.audit.judging import blocks
from ckpt_patches.audit.judging.holes import Hole, Rows, by_no_chance, edges_of, holes, snapped, stretches
from ckpt_patches.audit.judging.record_checksums import PartRead, wrong
from ckpt_patches.audit.judging.scan import Odd, OddRuns
from ckpt_patches.audit.readers import quantized, remainders
from ckpt_patches.audit.readers.checkpoint import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    MOMENTS,
    ROLES,
    VOCABULARY,
    WEIGHT,
    Checkpoint,
    Record,
    Shard,
)
from ckpt_patches.formats.zero_inventory import numbered

BOTH = blocks.NO_AVG | blocks.NO_SQ
ROWS_BY_CHANCE = 1e-6  # consecutive rows without gradient that are less likely than this are a gap
LEAST_SHARE_OF_ROWS = 1e-2
LEAST_NORMAL = 1e-30  # a first moment that has decayed by this factor may have become zero
DENORMAL_RUN = 16  # elements
# Megatron's buckets have padding with undefined content: after a parameter, and at the end.
PADDING, ALIGNMENT = 1024, 256  # elements; ALIGNMENT is per data-parallel rank
LEAST_MASK, LEAST_MASKED = 4, 0.25  # least elements of a mask, and least share of -inf
ZERO_MASTER = "all zeros, beside moments that are not: at a rate of 0, or in a first step, a run saves this"
OF_OPTIMIZER = re.compile(r"(?:^|[./])state[./]")  # in the name of a state, as torch's optimizers nest them
NEAR = 64  # elements: wrong elements at most this far apart are one range
MOST_FINDINGS = 1000  # of one kind in one array; more are merged


class View:
    """A shard with its odd runs, and the holes in its arrays."""

    def __init__(self, shard: Shard, odd: Odd, found: Checkpoint) -> None:
        self.shard, self.data_parallel, self.found = shard, found.data_parallel, found
        self.runs, self.is_cut, self.tallies = odd
        self.least = max(PADDING, ALIGNMENT * (self.data_parallel or 1)) if shard.has_odd_padding else 1  # elements
        self.repaired = {edge for moments in found.repaired_in(shard) for edge in moments}
        self.has_remainders = blocks.UNROUNDED in self.tallies and remainders.are_in(shard)
        ends, reach = {0, shard.numel}, 2 * shard.row
        masters = [snapped(hole, ends, reach) for hole in self._holes(MASTER)]
        # The edges in the master are the most exact: few weights are zero, but many moments are.
        edges = ends | edges_of(masters)
        self.holes = {
            MASTER: masters,
            **{role: [snapped(h, edges, reach) for h in self._holes(role)] for role in MOMENTS},
        }
        self.decayed = self._decayed()
        certain = {hole for own in self.holes.values() for hole in own} - self.decayed
        self.known = edges_of(certain) - ends  # where ranks cut the shard

    def _holes(self, role: str) -> list[Hole]:
        """The holes in one array that are too long to be padding."""
        return [hole for hole in self._all_holes(role) if hole.outer_end - hole.outer_begin >= self.least]

    def _all_holes(self, role: str) -> list[Hole]:
        code, numel = self.runs.code, self.shard.numel
        if role == MASTER:
            if self.has_remainders:
                return []  # zero is a normal value there
            found = holes(self.runs, blocks.NO_MASTER, code & blocks.CONTRADICTED > 0)
            return found if WEIGHT in self.shard.streams else by_no_chance(found, numel)
        if not set(MOMENTS) <= self.shard.streams.keys():
            return []
        if role == EXP_AVG:
            return by_no_chance(holes(self.runs, blocks.NO_AVG, code & BOTH == blocks.NO_AVG), numel)
        return by_no_chance(holes(self.runs, blocks.NO_SQ, code & blocks.AVG_IS_LARGE > 0), numel)

    def _decayed(self) -> set[Hole]:
        """Holes of rows whose first moment can have decayed to zero, long before the square does."""
        step = self.found.step
        if step is not None and float(self.found.beta1 or 0.9) ** step >= LEAST_NORMAL:
            return set()
        rows = Rows([(h.outer_begin, h.outer_end) for h in self.holes[EXP_AVG]], self.shard.row, self.repaired)
        return {hole for hole in self.holes[EXP_AVG] if rows.has(hole.outer_begin, hole.outer_end)}

    def both_moments(self, kind: damages.FindingKind, begin: int, end: int, detail: str = "") -> list[Finding]:
        return [self.finding(kind, role, begin, end, detail) for role in MOMENTS]

    def finding(self, kind: damages.FindingKind, role: str, begin: int, end: int, detail: str = "") -> Finding:
        written = written_by(self.shard, begin, end, self.data_parallel)
        detail = ", ".join(filter(None, (detail, written)))
        return Finding(kind, self.shard.streams[role].array, self.shard.label, begin, end, detail)


def written_by(shard: Shard, begin: int, end: int, data_parallel: int | None) -> str:
    """Name the ranks that wrote a range, by the files or an even division among ranks; empty if unknown."""
    ranks = [owner.rank for owner in shard.owners if owner.begin < end and begin < owner.end]
    if ranks:
        return f"written by {ranks[0]}" + (f" to {ranks[-1]}" if len(ranks) > 1 else "")
    if not data_parallel or shard.numel % data_parallel:
        return ""
    part = shard.numel // data_parallel
    if begin % part or end % part or (begin, end) == (0, shard.numel):
        return ""
    first, last = begin // part, end // part - 1
    return f"of data-parallel {numbered(first, last, data_parallel)}"


def judge(shard: Shard, odd: Odd, found: Checkpoint) -> Iterator[Finding]:
    """The findings of a shard; none for padding, which can hold anything."""
    if shard.is_padding:
        return
    view = View(shard, odd, found)
    for function in JUDGES:
        yield from _limited(list(function(view)))


def _limited(findings: list[Finding]) -> list[Finding]:
    """Merge the findings of a kind and array if there are too many to show."""
    by_array: dict[tuple[damages.FindingKind, str], list[Finding]] = {}
    for finding in findings:
        by_array.setdefault((finding.kind, finding.array), []).append(finding)
    return [finding for own in by_array.values() for finding in (own if len(own) <= MOST_FINDINGS else [_hull(own)])]


def _hull(findings: list[Finding]) -> Finding:
    last = max(finding.end or 0 for finding in findings)
    return replace(findings[0], end=last, detail=f"{len(findings)} places of these")


def lost_master(view: View) -> Iterator[Finding]:
    for hole in view.holes[MASTER]:
        if WEIGHT not in view.shard.streams and (hole.begin, hole.end) == (0, view.shard.numel):
            yield view.finding(damages.UNUSUAL, MASTER, 0, view.shard.numel, ZERO_MASTER)
        else:
            yield view.finding(damages.LOST_MASTER, MASTER, hole.begin, hole.end)


def lost_moment(view: View) -> Iterator[Finding]:
    """One moment is zero where the other is not."""
    for role in MOMENTS:
        for hole in view.holes[role]:
            kind = damages.MOMENT_GAP if hole in view.decayed else damages.LOST_MOMENT
            yield view.finding(kind, role, hole.begin, hole.end)


def moment_gap(view: View) -> Iterator[Finding]:
    """Both moments are zero: rows without gradient, or the same slice lost in both."""
    if not set(MOMENTS) <= view.shard.streams.keys():
        return
    ranges = stretches(view.runs, BOTH)
    if ranges == [(0, view.shard.numel)]:
        return  # the full shard; see `of_parameters`
    natural = _rows_without_gradient(view, ranges)
    gaps = [Hole(*found, *found, found[1] - found[0]) for found in ranges if found not in natural]
    for begin, end, *_ in by_no_chance(gaps, view.shard.numel):
        kind = damages.LOST_MOMENT if {begin, end} & view.known else damages.MOMENT_GAP
        detail = "rows without gradient can be among them" if is_vocabulary(view.shard) else ""
        yield from view.both_moments(kind, begin, end, detail)
    for begin, end in _between_edges(view, natural):
        yield from view.both_moments(damages.MOMENT_GAP, begin, end)
    if natural:
        elements = sum(end - begin for begin, end in natural)
        detail = f"{elements} elements in {len(natural)} places"
        yield view.finding(damages.NO_GRADIENT, EXP_AVG, min(natural)[0], max(natural)[1], detail)


def _between_edges(view: View, natural: set[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Ranges in the rows without gradient from one edge of a slice, known from another hole, to the next."""
    edges = sorted({0, *view.known, view.shard.numel})
    for begin, end in itertools.pairwise(edges):
        if view.known and any(first <= begin and end <= last for first, last in natural):
            yield begin, end


def _rows_without_gradient(view: View, ranges: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """The ranges that can be rows or columns without gradient."""
    rows = Rows(ranges, view.shard.row, view.repaired)
    natural = {found for found in ranges if rows.has(*found)}
    if is_vocabulary(view.shard) or not view.shard.has_rows:
        return natural
    elements = sum(end - begin for begin, end in natural)
    return {found for found in natural if _is_likely(view, *found, elements)}


def _is_likely(view: View, begin: int, end: int, elements: int) -> bool:
    """Whether this many consecutive rows can be without gradient, by the share of other such rows."""
    rows, own = view.shard.numel / view.shard.row, (end - begin) / view.shard.row
    share = max((elements - (end - begin)) / view.shard.numel, LEAST_SHARE_OF_ROWS)
    return float(rows * share**own) > ROWS_BY_CHANCE


def unrounded_master(view: View) -> Iterator[Finding]:
    """The master does not round to the weight. Scaled 8-bit weights are reported as not judged."""
    if view.has_remainders:
        detail = "whole numbers of 16 bits, what a bf16 weight lacks of its main parameter: nothing contradicts them"
        yield view.finding(damages.NOT_JUDGED, MASTER, 0, view.shard.numel, detail)
        return
    if blocks.UNROUNDED in view.tallies and (coarse := quantized.look(view.shard)):
        detail = f"masters differ from the model's weights as from {coarse.what}: they were not compared"
        yield view.finding(damages.NOT_JUDGED, MASTER, 0, view.shard.numel, detail)
        return
    unrounded, zeros = (view.tallies.get(bit) for bit in (blocks.UNROUNDED, blocks.NO_WEIGHT))
    # If all other masters round to their weights, a reload did reach the masters, and the weights are lost.
    is_lost_weight = unrounded and zeros and unrounded.elements == zeros.elements
    kind = damages.LOST_WEIGHT if is_lost_weight else damages.UNROUNDED_MASTER
    yield from _wrong(view, kind, MASTER, blocks.UNROUNDED)


def not_finite(view: View) -> Iterator[Finding]:
    for role in ROLES:
        yield from _wrong(view, damages.NOT_FINITE, role, blocks.NOT_FINITE[role])


def infinite(view: View) -> Iterator[Finding]:
    """Infinity in a tensor without moments. In one that the run does not train it can be a mask or an initial value."""
    name, numel, is_main = view.shard.parameter, view.shard.numel, MASTER in view.shard.streams
    is_other = view.found.knows_trained and not is_main and not OF_OPTIMIZER.search(name)
    is_untrained = is_other or name in view.found.buffers
    for bit in (bit for bit in (blocks.MASKED, blocks.INFINITE) if bit in view.tallies):
        is_minus = bit == blocks.MASKED
        if is_untrained or (not is_main and (is_minus or numel == 1)):
            is_mask = is_minus and numel >= LEAST_MASK and view.tallies[bit].elements >= LEAST_MASKED * numel
            yield from _wrong(view, damages.MASK if is_untrained and is_mask else damages.MASK_OR_DAMAGE, WEIGHT, bit)
        else:
            for role in view.shard.streams:
                yield from _wrong(view, damages.NOT_FINITE, role, bit)


def negative_square(view: View) -> Iterator[Finding]:
    yield from _wrong(view, damages.NEGATIVE_SQUARE, EXP_AVG_SQ, blocks.NEGATIVE)


def denormal_run(view: View) -> Iterator[Finding]:
    role = WEIGHT if WEIGHT in view.shard.streams else MASTER
    for begin, end in stretches(view.runs, blocks.DENORMAL):
        if end - begin >= max(DENORMAL_RUN, view.least):
            yield view.finding(damages.DENORMAL_RUN, role, begin, end)


def _wrong(view: View, kind: damages.FindingKind, role: str, bit: int) -> Iterator[Finding]:
    """Findings for the elements with a bit; nearby elements form one range."""
    if view.shard.has_odd_padding:
        kind = damages.ODD_IN_BUCKET
    chosen = view.runs.code & bit > 0
    begin, end = view.runs.begin[chosen], view.runs.end[chosen]
    if not len(begin):
        return
    tally, total = view.tallies[bit], np.concatenate([[0], np.cumsum(end - begin)])
    if tally.elements != total[-1]:  # some runs were dropped
        yield view.finding(kind, role, tally.begin, tally.end, f"{tally.elements} elements of these")
        return
    cuts = np.flatnonzero(begin[1:] - end[:-1] > NEAR) + 1
    if len(cuts) >= MOST_FINDINGS:
        cuts = cuts[:0]
    for first, last in zip([0, *cuts.tolist()], [*cuts.tolist(), len(begin)], strict=True):
        low, high, elements = int(begin[first]), int(end[last - 1]), int(total[last] - total[first])
        yield view.finding(kind, role, low, high, "" if elements == high - low else f"{elements} elements of these")


def not_judged(view: View) -> Iterator[Finding]:
    streams = view.shard.streams
    if MASTER in streams and WEIGHT in streams and not blocks.is_compared(streams[WEIGHT].dtype):
        detail = f"the model's weights are of torch.{streams[WEIGHT].dtype}, with which no master was compared"
        yield view.finding(damages.NOT_JUDGED, WEIGHT, 0, view.shard.numel, detail)
    for role in (MASTER, *MOMENTS):
        if role in streams and not blocks.is_number(streams[role].dtype):
            detail = f"elements of torch.{streams[role].dtype}, which are no numbers by themselves"
            yield view.finding(damages.NOT_JUDGED, role, 0, view.shard.numel, detail)
    if view.is_cut:
        role = next(iter(view.shard.streams))
        detail = f"zeros in more places than are kept, {len(view.runs.begin)}: the shorter ones were not judged"
        yield view.finding(damages.NOT_JUDGED, role, 0, view.shard.numel, detail)


JUDGES: tuple[Callable[[View], Iterator[Finding]], ...] = (
    lost_master,
    lost_moment,
    moment_gap,
    unrounded_master,
    not_finite,
    infinite,
    negative_square,
    denormal_run,
    not_judged,
)


def checksums(found: Checkpoint, pieces: list[PartRead]) -> Iterator[Finding]:
    """Findings for records whose checksum is wrong."""
    arrays = {
        (extent.path, extent.offset): stream.array
        for shard in found.shards
        for stream in shard.streams.values()
        for extent in stream.extents
    }
    for record in wrong(found.records, pieces):
        array = arrays.get((record.path, record.offset), record.path)
        yield Finding(damages.BAD_FILE, array, detail=of_checksum(record))


def of_checksum(record: Record) -> str:
    """Describe the checksum that is wrong."""
    return f"checksum of {record.nbytes} bytes at {record.offset} in {Path(record.path).name}"


def of_zero_masters(found: Checkpoint, findings: list[Finding]) -> Iterator[Finding]:
    """The findings; a main parameter that is zero only in some shards becomes `LOST_MASTER`."""
    counts = Counter(shard.streams[MASTER].array for shard in found.shards if MASTER in shard.streams)
    zeros = Counter(finding.array for finding in findings if finding.detail.startswith(ZERO_MASTER))
    for finding in findings:
        if finding.detail.startswith(ZERO_MASTER) and zeros[finding.array] < counts[finding.array]:
            yield replace(finding, kind=damages.LOST_MASTER, detail="all zeros, and the other shards are not")
        else:
            yield finding


def has_no_moments(shard: Shard, runs: OddRuns) -> bool:
    """Whether both moments of all elements are zero."""
    return set(MOMENTS) <= shard.streams.keys() and stretches(runs, BOTH) == [(0, shard.numel)]


def of_parameters(found: Checkpoint, without_moments: set[int]) -> Iterator[Finding]:
    """Findings for moments that are zero although the optimizer has stepped, or nonzero at step 0.

    `without_moments` has the `id` of each shard whose moments are all zero.
    """
    if found.step is None:
        return
    empty: dict[str, list[tuple[Shard, bool]]] = {}
    for shard in found.shards:
        if set(MOMENTS) <= shard.streams.keys() and shard.numel and not shard.is_padding:
            empty.setdefault(shard.parameter, []).append((shard, id(shard) in without_moments))
    if found.step == 0:
        yield from _without_step(found, [shard for own in empty.values() for shard, is_empty in own if not is_empty])
        return
    without = {name for name, shards in empty.items() if all(is_empty for _, is_empty in shards)}
    detail = f"step {found.step}"
    for name, shards in empty.items():
        for shard in (shard for shard, is_empty in shards if is_empty):
            kind = _kind_of_empty(shard, name in without, len(without) == len(empty))
            for role in MOMENTS:
                yield Finding(kind, shard.streams[role].array, shard.label, 0, shard.numel, detail)


def _without_step(found: Checkpoint, with_moments: list[Shard]) -> Iterator[Finding]:
    """Nonzero moments although no file records a step."""
    if with_moments:
        said = "step 0" if any("step" in group for group in found.groups) else "no step"
        found.step = None
        detail = f"moments that are not zero in {len(with_moments)} places, and {said}: a load counts from 0"
        yield Finding(damages.UNUSUAL, "param_groups", detail=detail)


def _kind_of_empty(shard: Shard, full_parameter: bool, all_parameters: bool) -> damages.FindingKind:
    """The finding kind of a shard without moments. If other shards have moments, it can be vocabulary padding."""
    if all_parameters:
        return damages.NO_MOMENTS
    if full_parameter:
        return damages.PARAMETER_WITHOUT_MOMENTS
    return damages.NO_GRADIENT if is_vocabulary(shard) else damages.MOMENT_GAP


def is_vocabulary(shard: Shard) -> bool:
    """Whether the rows are tokens, many of which are never seen."""
    return any(word in shard.parameter for word in VOCABULARY)
