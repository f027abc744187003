"""Repair a copy of a checkpoint. A plan lists what cannot be repaired before anything is written.

Lost main parameters come from the model's own weights, which are rounded. Lost moments come from an older checkpoint,
or are reset to zero. A lost second moment is reset together with its first moment: a first moment without its square
would cause huge steps.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_patches.audit import repair_list
from ckpt_patches.audit.audit import TO_RESUME_FROM, Report, audit_together
from ckpt_patches.audit.judging import blocks, record_checksums, scan
from ckpt_patches.audit.judging.record_checksums import of_checksum
from ckpt_patches.audit.judging.scan import stretches
from ckpt_patches.audit.judging.shifted import Shift
from ckpt_patches.audit.repair import same_run, unshift
from ckpt_patches.audit.repair.copies import (
    Range,
    begin_copy,
    copied,
    copy_ranges,
    end_copy,
    in_copy,
    sync,
    write_elements,
)
from ckpt_patches.audit.shares import shares
from ckpt_patches.errors import UserError
from ckpt_patches.formats import damages
from ckpt_patches.formats.checkpoint import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    MOMENTS,
    WEIGHT,
    Checkpoint,
    Copies,
    Extent,
    Shard,
    Stream,
)
from ckpt_patches.formats.damages import NOTE, Finding
from ckpt_patches.formats.dtypes import item_size
from ckpt_patches.formats.elements import read_elements, read_values
from ckpt_patches.formats.paths import path_within
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.formats.zarr import LOCKS
from ckpt_patches.runtime.distributed import Ranks
from ckpt_patches.runtime.durable import new_folder
from ckpt_patches.runtime.unfinished import check_outside, check_space
from ckpt_patches.runtime.units import in_bytes

FROM_WEIGHT, FROM_OLDER, RESET = "the model's weights, rounded", "an older checkpoint", "reset to zero"
AT_A_TIME = 1 << 19  # elements; fewer than the odd runs that a scan keeps

# The kinds that can be repaired in a master or in a moment.
IN_MASTER = (
    damages.LOST_MASTER,
    damages.UNROUNDED_MASTER,
    damages.OTHER_MASTERS,
    damages.NOT_FINITE,
    damages.SHIFTED_STATE,
)
IN_MOMENTS = (
    damages.LOST_MOMENT,
    damages.NO_MOMENTS,
    damages.NEGATIVE_SQUARE,
    damages.NOT_FINITE,
    damages.SHIFTED_STATE,
)
CHUNKS = (damages.MISSING_CHUNK, damages.SHORT_CHUNK)


@dataclass(frozen=True)
class Fill:
    """Elements of an array to fill, and their source: those in a range whose code has the bits."""

    array: str
    shard: str
    begin: int
    end: int
    role: str
    source: str
    bits: int  # 0: the full range


@dataclass(frozen=True)
class Plan:
    """What to repair, and what cannot be repaired."""

    fills: tuple[Fill, ...]
    cuts: tuple[Extent, ...]  # files that are too long, with their correct length
    refused: tuple[tuple[Finding, str], ...]  # with the reason
    shift: Shift | None = None  # the shift to undo
    copies: tuple[Copies, ...] = ()  # files to copy from others

    @property
    def is_possible(self) -> bool:
        """Whether a repair does anything. Damage beyond repair is left as it is; with a shift it prevents repair."""
        return bool(self.fills or self.cuts or self.copies or self.shift) and not (self.shift and self.refused)


def plan(report: Report, older: Report | None) -> Plan:
    """Plan the repair of each finding of a report."""
    places = {
        (stream.array, shard.label): (shard, role)
        for shard in report.checkpoint.shards
        for role, stream in (*shard.streams.items(), *shard.lost.items())
    }
    fills: dict[Fill, None] = {}
    cuts: list[Extent] = []
    refused = []
    lost = {own.name: own.lost for own in report.checkpoint.copies}
    wrong = [f for f in unshift.findings(report.findings, report.shift) if f.kind.severity != NOTE]
    # States that differ from the record are skipped: the audit of the copy compares them again.
    for finding in [f for f in wrong if f.kind is not damages.NOT_AS_RECORDED] or wrong:
        shard, role = places.get((finding.array, finding.shard), (None, ""))
        if finding.kind is damages.LONG_CHUNK and shard:
            cuts += shard.streams[role].extents
        elif finding.kind is damages.ONE_MODEL_FILE:
            refused += [(finding, lost[finding.array])] if lost[finding.array] else []
        elif finding.kind is damages.MIXED_ROWS:
            refused.append((finding, finding.kind.remedy))
        elif shard is None or finding.begin is None or finding.end is None:
            refused.append((finding, _no_copy(finding)))
        elif reason := unshift.why_not(finding, report.shift) or _why_not(finding, shard, role, older):
            refused.append((finding, reason))
        else:
            fills.update(dict.fromkeys(_fills(finding, shard, role, older)))
    copies = tuple(own for own in report.checkpoint.copies if not own.lost)
    return Plan(tuple(fills), tuple(cuts), tuple(refused), report.shift, copies)


def _why_not(finding: Finding, shard: Shard, role: str, older: Report | None) -> str:
    """Why a finding with a range cannot be repaired; empty if it can."""
    kinds = {MASTER: (*IN_MASTER, *CHUNKS), EXP_AVG: (*IN_MOMENTS, *CHUNKS), EXP_AVG_SQ: (*IN_MOMENTS, *CHUNKS)}
    if finding.kind not in kinds.get(role, ()):
        return _no_copy(finding)
    if role == MASTER:
        return (
            "" if WEIGHT in shard.streams else "the checkpoint does not have the model's own weights of these elements"
        )
    if older is None:
        return ""
    same = _same(older.checkpoint, shard)
    if same is None or role not in same.streams:
        return f"{older.checkpoint.path} has no such array of this shape"
    assert finding.begin is not None
    assert finding.end is not None
    for other in older.findings:
        overlaps = (
            other.begin is not None
            and other.end is not None
            and other.begin < finding.end
            and finding.begin < other.end
        )
        if (
            other.array == same.streams[role].array
            and other.shard == same.label
            and overlaps
            and other.kind.severity != NOTE
        ):
            return f"{older.checkpoint.path} has {other.kind.name} in the same range"
    return ""


def _no_copy(finding: Finding) -> str:
    """Why a finding is beyond repair."""
    return f"{finding.detail or finding.kind.meaning}: the checkpoint has nothing to take it from"


def _same(found: Checkpoint, shard: Shard) -> Shard | None:
    """The shard of another checkpoint with the same elements."""
    key = shard.parameter, shard.label, shard.shape
    return next((other for other in found.shards if (other.parameter, other.label, other.shape) == key), None)


def _fills(finding: Finding, shard: Shard, role: str, older: Report | None) -> Iterator[Fill]:
    """The fills for a finding. A lost square is reset together with its first moment."""
    assert finding.begin is not None
    assert finding.end is not None
    source = FROM_WEIGHT if role == MASTER else FROM_OLDER if older else RESET
    roles = MOMENTS if role == EXP_AVG_SQ and source == RESET else (role,)
    bits = 0 if role in shard.lost else _bits(finding, role)
    for own in roles:
        stream = shard.streams.get(own) or shard.lost[own]
        yield Fill(stream.array, shard.label, finding.begin, finding.end, own, source, bits)


def _bits(finding: Finding, role: str) -> int:
    """The bit in the codes of the damaged elements; 0 for all elements of the range."""
    if finding.kind is damages.SHIFTED_STATE:
        return 0  # all elements belong to another place
    if finding.kind is damages.NOT_FINITE:
        return blocks.NOT_FINITE[role]
    if finding.kind in (damages.UNROUNDED_MASTER, damages.OTHER_MASTERS):
        return blocks.UNROUNDED
    if finding.kind is damages.NEGATIVE_SQUARE:
        return blocks.NEGATIVE
    return {MASTER: blocks.NO_MASTER, EXP_AVG: blocks.NO_AVG, EXP_AVG_SQ: blocks.NO_SQ}[role]


@dataclass(frozen=True)
class Done:
    """What was repaired in an array's shard."""

    array: str
    shard: str
    source: str
    elements: int


@dataclass(frozen=True)
class Result:
    """The result of a repair."""

    done: tuple[Done, ...]
    copies: tuple[Copies, ...]
    moved: int  # elements of shifted masters moved back; the moments moved with them
    source: tuple[str, int | None] | None  # the older checkpoint and its step
    verdict: str  # of the copy
    left: tuple[tuple[Finding, str], ...]  # not repaired, with the reason; if any, the copy is not REPAIRED


def repair(
    path: Path,
    output: Path,
    older_path: Path | None,
    workers: int,
    ranks: Ranks | None = None,
    *,
    trust_source: bool = False,
    say: Callable[[str], object] = lambda line: None,
) -> Result | None:
    """Audit, plan, and write the repaired copy. Its audit must find exactly what could not be repaired.

    Only damaged elements change, and a first moment whose square is reset. With several ranks, all call this function
    and share the reading and the copying. Rank 0 repairs and renames the copy. The other ranks return None.

    Raises:
        UserError: the checkpoint is complete, nothing in it can be repaired, or the output exists; or the older
            checkpoint is not known to be of the same run, unless `trust_source`.
    """
    ranks = ranks or Ranks()
    ranks.first("looking at the output", lambda: _check_new(path, output))
    report = audit_together(path, workers, ranks)
    ranks.first("the audit", lambda: _check_damaged(report))
    older = audit_together(older_path, workers, ranks) if older_path else None
    ranks.first("the audit of the older checkpoint", lambda: _check_older(report, older, trust=trust_source))
    made = ranks.first("planning", lambda: _planned(report, older))
    with ExitStack() as stack:

        def begin() -> tuple[Path, list[list[Range]]]:
            temporary = stack.enter_context(new_folder(output))
            ranges = begin_copy(path, temporary, but=f"*{LOCKS}")
            nbytes = sum(found.end - found.begin for found in ranges)
            free = check_space(output, nbytes)
            say(f"{output}: copying {in_bytes(nbytes)}, and {in_bytes(free)} are free")
            divided = shares([found.cost for found in ranges], ranks.size)
            return temporary, [ranges[share.start : share.stop] for share in divided]

        def copy() -> None:
            copy_ranges(divided[ranks.rank], path, temporary)
            if ranks.rank:  # other hosts cannot flush this host's page cache; rank 0 flushes before the rename
                sync(divided[ranks.rank], temporary)

        def change() -> list[Done]:
            assert made
            assert report
            end_copy(path, temporary)
            return _execute(made, report.checkpoint, older.checkpoint if older else None, temporary)

        def finish() -> None:
            _check_result(report, made, result)
            stack.close()  # renames the copy

        temporary, divided = ranks.share("beginning the copy", begin)
        ranks.gather("copying", copy)
        done = ranks.first("repairing the copy", change)
        result = audit_together(temporary, workers, ranks)
        ranks.first("finishing the copy", finish)
    if made is None or done is None or result is None:
        return None
    moved = sum(one["end"] - one["begin"] for one in unshift.listed(made.shift))
    source = (str(older.checkpoint.path), older.checkpoint.step) if older else None
    return Result(tuple(done), made.copies, moved, source, result.verdict, made.refused)


# Run on rank 0, which alone has the reports


def _check_new(path: Path, output: Path) -> None:
    check_outside(path, output)
    if output.exists():
        raise UserError(f"{output}: expected a name for a new folder, found that it exists")


def _check_damaged(report: Report | None) -> None:
    if report and report.verdict in TO_RESUME_FROM:
        raise UserError(f"{report.checkpoint.path} is {report.verdict}: nothing to repair")


def _check_older(report: Report | None, older: Report | None, *, trust: bool) -> None:
    if report and older:
        same_run.check(report.checkpoint, older.checkpoint, trust=trust)


def _planned(report: Report | None, older: Report | None) -> Plan:
    assert report
    if older:
        unshift.check_older(older.checkpoint.path, older.shift)
    made = plan(report, older)
    if made.refused and not made.is_possible:
        lines = [f"  {f.kind.name} {f.array} {f.shard}: {reason or f.detail}" for f, reason in made.refused]
        path = report.checkpoint.path
        raise UserError("\n".join([f"{path} cannot be repaired, and nothing was written:", *lines]))
    return made


def _check_result(report: Report | None, made: Plan | None, result: Report | None) -> None:
    """Check that the copy has all findings that could not be repaired, and no others."""
    if report is None or made is None or result is None:
        return
    path, left = report.checkpoint.path, {_key(f, result) for f in result.findings if f.kind.severity != NOTE}
    refused = {_key(finding, report) for finding, _ in made.refused}
    allowed = refused | {_key(f, report) for f in report.findings if f.kind is damages.NOT_AS_RECORDED and refused}
    if more := {kind for kind, *_ in left - allowed}:
        raise UserError(f"{path} cannot be repaired: the repaired copy still has {', '.join(sorted(more))}")
    if gone := {kind for kind, *_ in refused - left}:
        raise UserError(f"{path} cannot be repaired: the repaired copy would hide {', '.join(sorted(gone))}")


def _key(finding: Finding, report: Report) -> tuple[str, str, str]:
    """A key of a finding, the same in a checkpoint and in its copy."""
    return finding.kind.name, finding.array.removeprefix(f"{report.checkpoint.path}/"), finding.shard


def _execute(made: Plan, found: Checkpoint, older: Checkpoint | None, copy: Path) -> list[Done]:
    """Apply the plan to the copy, and write the repair list into it."""
    shards = {
        (s.array, shard.label): shard for shard in found.shards for s in (*shard.streams.values(), *shard.lost.values())
    }
    for cut in made.cuts:
        os.truncate(in_copy(cut.path, found.path, copy), cut.nbytes)
    now = repair_list.Repaired()
    changed = unshift.gather(made.shift, found.path, copy)
    for fill in made.fills:
        shard = shards[fill.array, fill.shard]
        target = shard.streams.get(fill.role) or shard.lost[fill.role]
        own = copied(target, found.path, copy)
        source = shard.streams[WEIGHT] if fill.role == MASTER else None
        if fill.source == FROM_OLDER and older:
            same = _same(older, shard)
            source = same.streams[fill.role] if same else None
        ranges: list[tuple[int, int]] = []
        for begin in range(fill.begin, fill.end, AT_A_TIME):
            chosen = _damaged(shard, fill, begin, min(begin + AT_A_TIME, fill.end))
            _fill(own, source, chosen)
            ranges += chosen
        changed.update(extent.path for extent in own.extents)
        now.add((fill.array, fill.shard), ranges, _source(fill, older))
    changed.update(name for own in made.copies for name in _copy_files(own, copy))
    wrong = {finding.detail for finding, _ in made.refused}  # includes wrong checksums, which stay
    for record in found.records:
        if (name := in_copy(record.path, found.path, copy)) in changed and of_checksum(record) not in wrong:
            record_checksums.update_checksum(record._replace(path=name))
    files = {str(Path(name).relative_to(copy)) for name in changed}
    now.moved = unshift.listed(made.shift)
    now.copied = [{"from": own.name, "to": list(own.missing)} for own in made.copies]
    repair_list.write(copy, repair_list.read(replace(found, findings=[])), now, files)
    return [Done(*key, now.sources[key], now.elements(key)) for key in now.ranges]


def _source(fill: Fill, older: Checkpoint | None) -> str:
    """Describe the source of the elements."""
    if fill.source != FROM_OLDER or older is None:
        return fill.source
    step = f", step {older.step}" if older.step is not None else ""
    return f"{fill.source}: {older.path}{step}"


def _copy_files(files: Copies, copy: Path) -> Iterator[str]:
    """Copy the existing file to the missing ones. Yields their paths."""
    for name in files.missing:
        yield shutil.copy2(path_within(copy, files.name), str(path_within(copy, name)))


def _damaged(shard: Shard, fill: Fill, begin: int, end: int) -> list[tuple[int, int]]:
    """The ranges to fill between two elements, by the elements of the original checkpoint."""
    if not fill.bits:
        return [(begin, end)]
    with RangedFiles() as files:
        found = scan.look(scan.Span(0, shard.streams, begin, end, checked=False), files)
    return stretches(found.odd.runs, fill.bits)


def _fill(target: Stream, source: Stream | None, ranges: list[tuple[int, int]]) -> None:
    for begin, end in ranges:
        write_elements(target, begin, _content(target, source, begin, end))


def _content(target: Stream, source: Stream | None, begin: int, end: int) -> bytes:
    """The bytes for a range: zeros without a source. Other dtypes are converted through fp32."""
    if source is None:
        return bytes((end - begin) * item_size(target.dtype))
    if source.dtype == target.dtype:
        return bytes(read_elements(source, begin, end).data)
    values = read_values(source, begin, end)
    if values is None or target.dtype not in ("float32", "float64"):
        raise UserError(f"{target.array}: expected fp32, found {target.dtype}, which is not written")
    return bytes(values.astype(target.dtype).data)
