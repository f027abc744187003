"""Plan a repair: what is filled and from where, or why it is refused. Nothing has been written yet.

Lost main parameters come from the model's own weights, which are rounded. Lost moments come from an older checkpoint.
Without one they are reset, always both: one moment that does not belong to the other makes wrong steps. All damage is
repaired or none is: what is right is never guessed.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpt_patches.audit.audit import Report
from ckpt_patches.audit.judging import blocks, scan
from ckpt_patches.audit.ranges import Range, joined
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
from ckpt_patches.formats.dtypes import item_size
from ckpt_patches.formats.elements import read_elements
from ckpt_patches.formats.ranged import RangedFiles

FROM_WEIGHT, FROM_OLDER, RESET = "the model's weights, rounded", "an older checkpoint", "reset to zero"
AT_A_TIME = 1 << 19  # elements; fewer than the odd runs that a scan keeps
ZEROS = "both moments are zero already, and zeros over zeros repair nothing"

# The most elements of a state that a repair fills, of a rank's file or of the checkpoint. Races of megatron-core lose
# up to a third of a state (measured with models of five parameters).
MOST = 0.5

# A main parameter that does not round to its weight is of a file of another run or step, or the weight is.
CONTRADICTED = (damages.UNROUNDED_MASTER, damages.OTHER_MASTERS)
ZERO = {EXP_AVG: blocks.NO_AVG, EXP_AVG_SQ: blocks.NO_SQ}
# The kinds that can be repaired, and the bits in the codes of the damaged elements; 0: all elements of the range.
COMPLETELY = dict.fromkeys((damages.MISSING_CHUNK, damages.SHORT_CHUNK), 0)
REPAIRED: dict[str, dict[FindingKind, int]] = {
    MASTER: {
        **COMPLETELY,
        damages.LOST_MASTER: blocks.NO_MASTER,
        damages.NOT_FINITE: blocks.NOT_FINITE[MASTER],
    },
    **{
        role: {
            **COMPLETELY,
            **dict.fromkeys((damages.LOST_MOMENT, damages.NO_MOMENTS), zero),
            damages.NOT_FINITE: blocks.NOT_FINITE[role],
            damages.NEGATIVE_SQUARE: blocks.NEGATIVE,
        }
        for role, zero in ZERO.items()
    },
}
# The kinds that a repair can remove, in some checkpoints.
REPAIRABLE = {kind for kinds in REPAIRED.values() for kind in kinds}


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
    planned: list[tuple[Finding, list[Fill]]] = []
    refused: list[tuple[Finding, str]] = []
    wrong = [f for f in report.findings if f.kind.severity != NOTE]
    # States that differ from the record are skipped: the audit of the copy compares them again.
    for finding in [f for f in wrong if f.kind is not damages.NOT_AS_RECORDED] or wrong:
        shard, role = places.get((finding.array, finding.shard), (None, ""))
        if reason := _why_not(finding, report, shard, role, source):
            refused.append((finding, reason))
        elif shard:
            planned.append((finding, [*_fills(finding, shard, role, source)]))
    fills = [fill for _, own in planned for fill in own]
    roles = {fill.role for fill in fills}
    # A rank that has lost all it holds leaves parameters without moments, which alone are only unusual.
    unusual = [f for f in report.findings if f.kind is damages.PARAMETER_WITHOUT_MOMENTS]
    empty = [Fill(*places[f.array, f.shard], "", [_range(f)]) for f in unusual]
    _check_extent(report, [*fills, *(fill for fill in empty if fill.role in roles)])
    resets = [(finding, own) for finding, own in planned if own[0].source == RESET]
    refused += [(finding, ZEROS) for finding, own in resets if not any(map(_has_content, own))]
    if refused:
        lines = [f"  {f.kind.name} {f.array} {f.shard}: {reason}" for f, reason in refused]
        raise UserError("\n".join([f"{found.path} cannot be repaired, and nothing was written:", *lines]))
    return fills


def places_in(found: Checkpoint) -> dict[tuple[str, str], tuple[Shard, str]]:
    """The shard and the role of each array's part, by the array and the shard's label."""
    return {
        (stream.array, shard.label): (shard, role)
        for shard in found.shards
        for role, stream in (*shard.streams.items(), *shard.lost.items())
    }


def _why_not(finding: Finding, report: Report, shard: Shard | None, role: str, source: str) -> str:
    """Why a finding cannot be repaired; empty if it can."""
    if finding.kind in (damages.MIXED_ROWS, damages.ONE_MODEL_FILE, damages.SHIFTED_STATE):
        return finding.kind.remedy
    if shard is not None and finding.kind in CONTRADICTED:
        names = " and ".join(_files(report, shard, (MASTER, WEIGHT), *_range(finding)))
        return (
            f"main parameters and weights in {names} contradict each other, and nothing tells which of them are right"
        )
    if shard is None or finding.begin is None or finding.kind not in REPAIRED.get(role, ()):
        return f"{finding.detail or finding.kind.meaning}: the checkpoint has nothing to take it from"
    if role == MASTER and WEIGHT not in shard.streams:
        return "the checkpoint does not have the model's own weights of these elements"
    if role in MOMENTS and source == RESET and not {*MOMENTS} <= shard.streams.keys() | shard.lost.keys():
        return "the other moment of these elements, which would be reset with it, is absent or cut in another way"
    if finding.kind is damages.LOST_MOMENT and _is_in_rows(shard, role, *_range(finding)):
        one, other = (_files(report, shard, (own,), *_range(finding)) for own in MOMENTS)
        if one != other and all(map(rank_of, one + other)):
            names = " and ".join(sorted({*one, *other}))
            return f"{names} can be of two runs or steps, of which one had no gradient in these rows: nothing tells"
    return ""


def _range(finding: Finding) -> Range:
    return finding.begin or 0, finding.end or 0


def _files(report: Report, shard: Shard, roles: Iterable[str], begin: int, end: int) -> list[str]:
    """The names of the files that hold these states of a range, by their places in the checkpoint."""
    parts = [part for role in roles for part in _parts(shard, role)]
    paths = sorted({path for path, first, last in parts if path and first < end and begin < last})
    return [str(Path(path).relative_to(report.checkpoint.path)) for path in paths]


def _is_in_rows(shard: Shard, role: str, begin: int, end: int) -> bool:
    """Whether zeros are what a good file can have: rows without a gradient, or the same columns of several rows."""
    row = shard.row
    ranges = [(begin // row * row, -(-end // row) * row), (begin - row, end - row), (begin + row, end + row)]
    inside = [own for own in ranges if own[0] >= 0 and own[1] <= shard.numel]
    return any(joined(_damaged(shard, *own, ZERO[role])) == [own] for own in inside)


def _fills(finding: Finding, shard: Shard, role: str, source: str) -> Iterator[Fill]:
    """The fills for a finding."""
    bits, ranges = REPAIRED[role][finding.kind], [_range(finding)]
    if bits and role in shard.streams:
        ranges = list(_damaged(shard, *ranges[0], bits))
    for own in MOMENTS if role in MOMENTS and source == RESET else (role,):
        yield Fill(shard, own, FROM_WEIGHT if own == MASTER else source, ranges)


def pieces(ranges: Iterable[Range]) -> Iterator[Range]:
    """Ranges of as many elements as are read at a time."""
    return ((at, min(at + AT_A_TIME, end)) for begin, end in ranges for at in range(begin, end, AT_A_TIME))


def _has_content(fill: Fill) -> bool:
    """Whether a reset changes an element, or writes one that is absent."""
    if fill.role in fill.shard.lost:
        return True
    return any(read_elements(fill.stream, *piece).view("u1").any() for piece in pieces(fill.ranges))


def _damaged(shard: Shard, begin: int, end: int, bits: int) -> Iterator[Range]:
    """The elements in a range whose codes have the bits."""
    with RangedFiles() as files:
        for piece in pieces([(begin, end)]):
            yield from scan.stretches(scan.look(scan.Span(0, shard.streams, *piece, checked=False), files).odd, bits)


def _check_extent(report: Report, fills: list[Fill]) -> None:
    """Refuse damage of most of a state in all parameters, or in a file of several arrays.

    Raises:
        UserError: it is so.
    """
    ranges: dict[tuple[str, int], list[Range]] = {}
    for fill in fills:
        ranges.setdefault((fill.role, id(fill.shard)), []).extend(fill.ranges)
    shards, arrays = report.checkpoint.shards, dict[str, set[str]]()  # by file
    for stream in (stream for shard in shards for stream in shard.streams.values()):
        for extent in stream.extents:
            arrays.setdefault(extent.path, set()).add(stream.array)
    for role in dict.fromkeys(fill.role for fill in fills):
        wrong, total = Counter[str](), Counter[str]()  # elements by file
        for shard in (shard for shard in shards if role in {*shard.streams, *shard.lost}):
            own = joined(ranges.get((role, id(shard)), []))
            for name, first, last in _parts(shard, role):
                total[name] += last - first
                wrong[name] += sum(max(0, min(end, last) - max(begin, first)) for begin, end in own)
        for name, elements in wrong.items():
            if elements > MOST * total[name] and len(arrays.get(name, ())) != 1:
                raise UserError(
                    f"{report.checkpoint.path} cannot be repaired, and nothing was written: expected damage in a small "
                    f"part, found it in {elements} of {total[name]} elements of {role} in {name or 'all parameters'}: "
                    "files of another run or step look the same, and nothing tells which is right. Take another "
                    "checkpoint, or put the right file in its place"
                )


def _parts(shard: Shard, role: str) -> Iterator[tuple[str, int, int]]:
    """A state's elements in each file, and in all of them under ''. Weights are counted with their masters."""
    yield "", 0, shard.numel
    own = (role, WEIGHT) if role == MASTER else (role,)
    for stream in (shard.streams[role] for role in own if role in shard.streams):
        first = 0
        for extent in stream.extents:
            last = first + extent.nbytes // item_size(stream.dtype)
            yield extent.path, first, last
            first = last
