"""Plan a repair: what is filled and from where, or why it is refused. Nothing has been written yet.

Lost main parameters come from the model's own weights, which are rounded. Lost moments come from an older checkpoint.
Without one they are reset, always both: one moment that does not belong to the other makes wrong steps. All damage is
repaired or none is: what is right is never guessed.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ckpt_patches.audit.audit import Report
from ckpt_patches.audit.judging import blocks, recorded_states, scan
from ckpt_patches.audit.ranges import Range, joined, overlap
from ckpt_patches.errors import UserError
from ckpt_patches.formats import damages
from ckpt_patches.formats.checkpoint import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    MOMENTS,
    WEIGHT,
    Checkpoint,
    Shard,
    Stream,
    rank_of,
)
from ckpt_patches.formats.damages import NOTE, Finding, FindingKind
from ckpt_patches.formats.ranged import RangedFiles

FROM_WEIGHT, FROM_OLDER, RESET = "the model's weights, rounded", "an older checkpoint", "reset to zero"
NOTHING = "the checkpoint has nothing to take it from, or another array of this name"
ZEROS = "both moments are zero already, and zeros over zeros repair nothing"
AT_A_TIME = 1 << 19  # elements; fewer than the odd runs that a scan keeps

# The most elements of a state that a repair fills, of those that a rank wrote or of the checkpoint. Races of
# megatron-core lose up to a third of a state (measured with models of five parameters).
MOST = 0.5

ZERO = {EXP_AVG: blocks.NO_AVG, EXP_AVG_SQ: blocks.NO_SQ}
ALL = dict.fromkeys((MASTER, *MOMENTS), 0)
# The kinds that can be repaired; by role, the bits in the codes of the damaged elements, 0 for all of the range.
REPAIRABLE: dict[FindingKind, dict[str, int]] = {
    damages.MISSING_CHUNK: ALL,
    damages.SHORT_CHUNK: ALL,
    damages.LOST_MASTER: {MASTER: blocks.NO_MASTER},
    damages.LOST_MOMENT: ZERO,
    damages.NOT_FINITE: {role: blocks.NOT_FINITE[role] for role in ALL},
    damages.NEGATIVE_SQUARE: {EXP_AVG_SQ: blocks.NEGATIVE},
}


@dataclass(frozen=True)
class Fill:
    """Elements of an array to fill, and their source."""

    shard: Shard
    role: str
    source: str
    ranges: list[Range]

    @property
    def stream(self) -> Stream:
        return self.shard.streams.get(self.role) or self.shard.lost[self.role]


def plan(report: Report, source: str) -> list[Fill]:
    """Plan the repair of all damage in a report, with `FROM_OLDER` or `RESET` as the source of moments.

    Raises:
        UserError: some of it cannot be repaired, or so much is damaged that the rest is to be doubted as well.
    """
    found = report.checkpoint
    places = places_in(found)
    fills: list[Fill] = []
    refused = []
    wrong = [own for own in report.findings if own.kind.severity != NOTE]
    lost = {(own.array, *_place(own)) for own in wrong if own.kind is damages.LOST_MOMENT}
    for finding in _without_differences(found, wrong):
        shard, role = places.get((finding.array, finding.shard), (None, ""))
        if reason := _why_not(finding, lost, shard, role, source):
            refused.append(f"  {finding.kind.name} {finding.array} {finding.shard}: {reason}")
        elif shard:
            fills += _fills(finding, shard, role, source)
    if refused:
        raise UserError("\n".join([f"{found.path} cannot be repaired, and nothing was written:", *refused]))
    _check_extent(found, fills)
    return fills


def _without_differences(found: Checkpoint, wrong: list[Finding]) -> list[Finding]:
    """The findings without the differences from a record of states that have lost elements: no surprise there."""
    differ = [own for own in wrong if own.kind is damages.NOT_AS_RECORDED]
    ranges = {(own.array, own.shard): [(own.begin, own.end or 0)] for own in wrong if own.begin is not None}
    known = recorded_states.keys_of(found, ranges) if differ else set()
    return [own for own in wrong if own not in differ or (own.array, own.detail.partition(": ")[0]) not in known]


def places_in(found: Checkpoint) -> dict[tuple[str, str], tuple[Shard, str]]:
    """The shard and the role of each array's part, by the array and the shard's label, unless two parts share these."""
    every = [
        ((stream.array, shard.label), (shard, role))
        for shard in found.shards
        for role, stream in (*shard.streams.items(), *shard.lost.items())
    ]
    counts = Counter(key for key, _ in every)
    return {key: place for key, place in every if counts[key] == 1}


def _place(finding: Finding) -> tuple[object, ...]:
    return finding.shard, finding.begin, finding.end


def _why_not(finding: Finding, lost: set[tuple[object, ...]], shard: Shard | None, role: str, source: str) -> str:
    """Why a finding cannot be repaired; empty if it can."""
    files = {extent.path for extent in shard.extents} if shard else set()
    names = " and ".join(sorted(map(os.path.basename, files)))
    if shard is None or finding.begin is None or role not in REPAIRABLE.get(finding.kind, ()):
        reason = NOTHING if finding.kind in REPAIRABLE else finding.kind.remedy
        return "; ".join(filter(None, (finding.detail, names and f"in {names}", reason)))
    if role == MASTER and WEIGHT not in shard.streams:
        return "the checkpoint does not have the model's own weights of these elements"
    if role in MOMENTS and source == RESET and not {*MOMENTS} <= shard.streams.keys() | shard.lost.keys():
        return "the other moment of these elements, which would be reset with it, is absent or cut in another way"
    if finding.kind is damages.LOST_MOMENT:
        if source == RESET and all((shard.streams[own].array, *_place(finding)) in lost for own in MOMENTS):
            return f"{ZEROS}: repeat with --from OLDER, a whole checkpoint of the run"
        one, other = ({extent.path for extent in shard.streams[own].extents} for own in MOMENTS)
        if one != other and all(map(rank_of, one | other)):
            return f"{names} can be of two runs or steps, of which one had no gradient here: nothing tells"
    return ""


def _fills(finding: Finding, shard: Shard, role: str, source: str) -> Iterator[Fill]:
    """The fills for a finding."""
    bits, ranges = REPAIRABLE[finding.kind][role], [(finding.begin or 0, finding.end or 0)]
    if bits and role in shard.streams:
        ranges = list(_damaged(shard, *ranges[0], bits))
    for own in MOMENTS if role in MOMENTS and source == RESET else (role,):
        yield Fill(shard, own, FROM_WEIGHT if own == MASTER else source, ranges)


def pieces(ranges: Iterable[Range]) -> Iterator[Range]:
    """Ranges of as many elements as are read at a time."""
    return ((at, min(at + AT_A_TIME, end)) for begin, end in ranges for at in range(begin, end, AT_A_TIME))


def _damaged(shard: Shard, begin: int, end: int, bits: int) -> Iterator[Range]:
    """The elements in a range whose codes have the bits."""
    with RangedFiles() as files:
        for piece in pieces([(begin, end)]):
            yield from scan.stretches(scan.look(scan.Span(0, shard.streams, *piece, checked=False), files).odd, bits)


def _check_extent(found: Checkpoint, fills: Iterable[Fill]) -> None:
    """Refuse damage of most of a state in all parameters, or in all that a rank wrote.

    Raises:
        UserError: it is so.
    """
    ranges: dict[tuple[str, int], list[Range]] = {}
    for fill in fills:
        ranges.setdefault((fill.role, id(fill.shard)), []).extend(fill.ranges)
    wrong, total = Counter[tuple[str, str]](), Counter[tuple[str, str]]()  # elements by state and rank
    for role in {role for role, _ in ranges}:
        for shard in (own for own in found.shards if role in {*own.streams, *own.lost}):
            own = joined(ranges.get((role, id(shard)), []))
            parts = [("all ranks", 0, shard.numel), *(owner for owner in shard.owners if owner.rank)]
            for rank, first, last in parts:
                total[role, rank] += last - first
                wrong[role, rank] += overlap(own, first, last)
    for (role, rank), elements in wrong.items():
        if elements > MOST * total[role, rank]:
            raise UserError(
                f"{found.path} cannot be repaired, and nothing was written: expected damage in a small part, found it "
                f"in {elements} of {total[role, rank]} elements of {role} of {rank}: files of another run or step look "
                "the same, and nothing tells which is right. Take another checkpoint, or put the right file in its "
                "place"
            )
