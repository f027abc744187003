"""Plan a repair: what is filled, from where, and what is refused. It is complete before anything is written.

Lost main parameters come from the model's own weights, which are rounded. Lost moments come from an older checkpoint.
Without one they are reset, always both: one moment that does not belong to the other makes wrong steps.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt_patches.audit.audit import Report
from ckpt_patches.audit.judging import blocks, scan
from ckpt_patches.audit.judging.shifted import Shift
from ckpt_patches.audit.ranges import Range, joined
from ckpt_patches.audit.repair import unshift
from ckpt_patches.errors import UserError
from ckpt_patches.formats import damages
from ckpt_patches.formats.checkpoint import EXP_AVG, EXP_AVG_SQ, MASTER, MOMENTS, WEIGHT, Copies, Extent, Shard, Stream
from ckpt_patches.formats.damages import NOTE, Finding
from ckpt_patches.formats.dtypes import item_size
from ckpt_patches.formats.ranged import RangedFiles

FROM_WEIGHT, FROM_OLDER, RESET = "the model's weights, rounded", "an older checkpoint", "reset to zero"
AT_A_TIME = 1 << 19  # elements; fewer than the odd runs that a scan keeps

# The most elements of a state that a repair fills, of a rank's file or of the checkpoint. Races of megatron-core lose
# up to a third of a state (measured with models of five parameters). Nothing tells which of two values is wrong: of
# main parameters that are not lost, and only do not round to the weights, few of the checkpoint may be.
MOST, MOST_CONTRADICTED = 0.5, 0.1
CONTRADICTED = (damages.UNROUNDED_MASTER, damages.OTHER_MASTERS)

# The kinds that can be repaired, and the bits in the codes of the damaged elements.
IN_MASTER = {
    damages.LOST_MASTER: blocks.NO_MASTER,
    damages.NOT_FINITE: blocks.NOT_FINITE[MASTER],
    **dict.fromkeys(CONTRADICTED, blocks.UNROUNDED),
}
IN_MOMENT = {
    role: {
        **dict.fromkeys((damages.LOST_MOMENT, damages.NO_MOMENTS), bit),
        damages.NOT_FINITE: blocks.NOT_FINITE[role],
        damages.NEGATIVE_SQUARE: blocks.NEGATIVE,
    }
    for role, bit in ((EXP_AVG, blocks.NO_AVG), (EXP_AVG_SQ, blocks.NO_SQ))
}
REPAIRED = {MASTER: IN_MASTER, **IN_MOMENT}
COMPLETELY = (damages.SHIFTED_STATE, damages.MISSING_CHUNK, damages.SHORT_CHUNK)  # all elements of the range


@dataclass(frozen=True)
class Fill:
    """Elements of an array to fill, and their source."""

    kind: damages.FindingKind
    shard: Shard
    role: str
    source: str
    ranges: list[Range]

    @property
    def stream(self) -> Stream:
        return self.shard.streams.get(self.role) or self.shard.lost[self.role]


@dataclass(frozen=True)
class Plan:
    """What to repair, and what cannot be repaired."""

    fills: list[Fill]
    cuts: list[Extent]  # files that are too long, with their correct length
    refused: list[tuple[Finding, str]]  # with the reason
    shift: Shift | None  # the shift to undo
    copies: tuple[Copies, ...]  # files to copy from others

    @property
    def is_possible(self) -> bool:
        """Whether a repair does anything. Damage beyond repair is left as it is; with a shift it prevents repair."""
        return bool(self.fills or self.cuts or self.copies or self.shift) and not (self.shift and self.refused)


def plan(report: Report, source: str) -> Plan:
    """Plan the repair of each finding of a report, with `FROM_OLDER` or `RESET` as the source of moments.

    Raises:
        UserError: so much is damaged that the rest is to be doubted as well.
    """
    found = report.checkpoint
    places = {
        (stream.array, shard.label): (shard, role)
        for shard in found.shards
        for role, stream in (*shard.streams.items(), *shard.lost.items())
    }
    lost = {own.name: own.lost for own in found.copies}
    made = Plan([], [], [], report.shift, tuple(own for own in found.copies if not own.lost))
    wrong = [f for f in unshift.findings(report.findings, report.shift) if f.kind.severity != NOTE]
    # States that differ from the record are skipped: the audit of the copy compares them again.
    for finding in [f for f in wrong if f.kind is not damages.NOT_AS_RECORDED] or wrong:
        shard, role = places.get((finding.array, finding.shard), (None, ""))
        if finding.kind is damages.LONG_CHUNK and shard:
            made.cuts.extend(shard.streams[role].extents)
        elif finding.kind is damages.ONE_MODEL_FILE and not lost[finding.array]:
            continue
        elif reason := lost.get(finding.array) or _why_not(finding, report.shift, shard, role, source):
            made.refused.append((finding, reason))
        elif shard:
            made.fills.extend(_fills(finding, shard, role, source))
    _check_extent(report, [fill for fill in made.fills if fill.kind in CONTRADICTED], MOST_CONTRADICTED)
    _refuse_parameters(made, [(f, *places.get((f.array, f.shard), (None, ""))) for f in wrong])
    others = [fill for fill in made.fills if fill.kind not in (*CONTRADICTED, damages.SHIFTED_STATE)]
    # A rank that has lost all it holds leaves parameters without moments, which alone are only unusual.
    unusual = [f for f in report.findings if f.kind is damages.PARAMETER_WITHOUT_MOMENTS]
    others += [
        Fill(finding.kind, shard, role, "", [(finding.begin or 0, finding.end or 0)])
        for finding in unusual
        for shard, role in [places[finding.array, finding.shard]]
        if role in {fill.role for fill in others}
    ]
    _check_extent(report, others, MOST)
    return made


def _refuse_parameters(made: Plan, wrong: list[tuple[Finding, Shard | None, str]]) -> None:
    """Refuse parameters of which most do not round to their weights: the weights may be another run's, or new."""
    fills = [fill for fill in made.fills if fill.kind in CONTRADICTED]
    elements = Counter[int]()
    for fill in fills:
        elements[id(fill.shard)] += sum(end - begin for begin, end in fill.ranges)
    refused = {id(fill.shard) for fill in fills if elements[id(fill.shard)] > MOST * fill.shard.numel}
    made.fills[:] = [fill for fill in made.fills if fill.kind not in CONTRADICTED or id(fill.shard) not in refused]
    reason = "most of the parameter is not what rounds to its weight, and nothing tells which of the two is right"
    made.refused.extend((f, reason) for f, shard, _ in wrong if f.kind in CONTRADICTED and id(shard) in refused)


def _why_not(finding: Finding, shift: Shift | None, shard: Shard | None, role: str, source: str) -> str:
    """Why a finding cannot be repaired; empty if it can."""
    if shard and finding.begin is not None and (reason := unshift.why_not(finding, shift)):
        return reason
    if shard and role in REPAIRED and finding.begin is not None and finding.kind in (*REPAIRED[role], *COMPLETELY):
        if role == MASTER and WEIGHT not in shard.streams:
            return "the checkpoint does not have the model's own weights of these elements"
        if role in MOMENTS and source == RESET and not {*MOMENTS} <= shard.streams.keys() | shard.lost.keys():
            return "the other moment of these elements, which would be reset with it, is absent or cut in another way"
        return ""
    if finding.kind is damages.MIXED_ROWS:
        return finding.kind.remedy
    return f"{finding.detail or finding.kind.meaning}: the checkpoint has nothing to take it from"


def _fills(finding: Finding, shard: Shard, role: str, source: str) -> Iterator[Fill]:
    """The fills for a finding."""
    bits = REPAIRED[role].get(finding.kind, 0)
    begin, end = finding.begin or 0, finding.end or 0
    ranges = list(_damaged(shard, begin, end, bits)) if bits and role in shard.streams else [(begin, end)]
    for own in MOMENTS if role in MOMENTS and source == RESET else (role,):
        yield Fill(finding.kind, shard, own, FROM_WEIGHT if own == MASTER else source, ranges)


def _damaged(shard: Shard, begin: int, end: int, bits: int) -> Iterator[Range]:
    """The elements in a range whose codes have the bits."""
    with RangedFiles() as files:
        for first in range(begin, end, AT_A_TIME):
            span = scan.Span(0, shard.streams, first, min(first + AT_A_TIME, end), checked=False)
            yield from scan.stretches(scan.look(span, files).odd.runs, bits)


def _check_extent(report: Report, fills: list[Fill], most: float) -> None:
    """Refuse damage of more than `most` of a state in all parameters, or of most of it in a file of several arrays.

    Raises:
        UserError: it is so.
    """
    shards, arrays = report.checkpoint.shards, dict[str, set[str]]()
    for stream in (stream for shard in shards for stream in shard.streams.values()):
        for extent in stream.extents:
            arrays.setdefault(extent.path, set()).add(stream.array)
    ranges: dict[tuple[str, int], list[Range]] = {}
    for fill in fills:
        ranges.setdefault((fill.role, id(fill.shard)), []).extend(fill.ranges)
    for role in dict.fromkeys(fill.role for fill in fills):
        wrong, total = Counter[str](), Counter[str]()
        for shard in (shard for shard in shards if role in {*shard.streams, *shard.lost}):
            total += _by_file(shard, role, [(0, shard.numel)])
            wrong += _by_file(shard, role, joined(ranges.get((role, id(shard)), [])))
        for name, elements in wrong.items():
            if elements > (MOST if name else most) * total[name] and len(arrays.get(name, ())) != 1:
                raise UserError(
                    f"{report.checkpoint.path} cannot be repaired, and nothing was written: expected damage in a small "
                    f"part, found it in {elements} of {total[name]} elements of {role} in {name or 'all parameters'}: "
                    "files of another run or step look the same, and nothing tells which is right. Take another "
                    "checkpoint, or put the right file in its place"
                )


def _by_file(shard: Shard, role: str, ranges: list[Range]) -> Counter[str]:
    """How many of these elements lie in each file; in all of them under ''. Weights are counted with their masters."""
    found = Counter({"": sum(end - begin for begin, end in ranges)})
    for own in (role, WEIGHT) if role == MASTER else (role,):
        stream, first = shard.streams.get(own, Stream("", "uint8", ())), 0
        for extent in stream.extents:
            last = first + extent.nbytes // item_size(stream.dtype)
            found[extent.path] += sum(max(0, min(end, last) - max(begin, first)) for begin, end in ranges)
            first = last
    return found
