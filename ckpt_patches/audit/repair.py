"""Repair what can be repaired, in a copy: a plan, which says what cannot before anything is written, and its execution.

Lost masters come from the model's own weights, which are rounded. Lost moments come from an older checkpoint, or are
reset: a lost first moment to zero, a lost square together with its first moment, because a mean without its
square would make huge steps.
"""

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ckpt_patches.audit import checksums, damages
from ckpt_patches.audit.audit import WHOLE, Report, audit, repaired_list
from ckpt_patches.audit.blocks import as_float32
from ckpt_patches.audit.checkpoint import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    MOMENTS,
    WEIGHT,
    Checkpoint,
    Extent,
    Shard,
    Stream,
)
from ckpt_patches.audit.damages import NOTE, Finding
from ckpt_patches.audit.scan import read_elements
from ckpt_patches.errors import UserError
from ckpt_patches.formats.dtypes import item_size
from ckpt_patches.formats.durable import new_folder, write_durably
from ckpt_patches.formats.zarr import LOCKS

FROM_WEIGHT, FROM_OLDER, RESET = "the model's weights, rounded", "an older checkpoint", "reset to zero"
AT_A_TIME = 1 << 22  # elements

# What can be repaired, of a master or of a moment; what is not listed cannot.
IN_MASTER = (damages.LOST_MASTER, damages.UNROUNDED_MASTER, damages.NOT_FINITE)
IN_MOMENTS = (
    damages.LOST_MOMENT,
    damages.MOMENT_GAP,
    damages.NO_MOMENTS,
    damages.PARAMETER_WITHOUT_MOMENTS,
    damages.NEGATIVE_SQUARE,
    damages.NOT_FINITE,
)
CHUNKS = (damages.MISSING_CHUNK, damages.SHORT_CHUNK)


@dataclass(frozen=True)
class Fill:
    """A range of an array, and what goes into it."""

    array: str
    shard: str
    begin: int
    end: int
    role: str
    source: str


@dataclass(frozen=True)
class Plan:
    """What is done, and what cannot be."""

    fills: tuple[Fill, ...]
    cuts: tuple[Extent, ...]  # files that are longer than they should be, with their right length
    refused: tuple[tuple[Finding, str], ...]  # with the reason


def plan(report: Report, older: Report | None) -> Plan:
    """How each finding of a report is repaired."""
    places = {
        (stream.array, shard.label): (shard, role)
        for shard in report.checkpoint.shards
        for role, stream in (*shard.streams.items(), *shard.lost.items())
    }
    fills: dict[Fill, None] = {}
    cuts: list[Extent] = []
    refused = []
    for finding in (f for f in report.findings if f.kind.severity != NOTE):
        shard, role = places.get((finding.array, finding.shard), (None, ""))
        if finding.kind is damages.LONG_CHUNK and shard:
            cuts += shard.streams[role].extents
        elif shard is None or finding.begin is None or finding.end is None:
            refused.append((finding, finding.kind.remedy))
        elif reason := _why_not(finding, shard, role, older):
            refused.append((finding, reason))
        else:
            fills.update(dict.fromkeys(_fills(shard, role, finding.begin, finding.end, older)))
    return Plan(tuple(fills), tuple(cuts), tuple(refused))


def _why_not(finding: Finding, shard: Shard, role: str, older: Report | None) -> str:
    """Why a finding with a range cannot be repaired; empty if it can."""
    kinds = {MASTER: (*IN_MASTER, *CHUNKS), EXP_AVG: (*IN_MOMENTS, *CHUNKS), EXP_AVG_SQ: (*IN_MOMENTS, *CHUNKS)}
    if finding.kind not in kinds.get(role, ()):
        return finding.kind.remedy
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


def _same(found: Checkpoint, shard: Shard) -> Shard | None:
    """The shard of another checkpoint with the same elements."""
    key = shard.parameter, shard.label, shard.shape
    return next((other for other in found.shards if (other.parameter, other.label, other.shape) == key), None)


def _fills(shard: Shard, role: str, begin: int, end: int, older: Report | None) -> Iterator[Fill]:
    source = FROM_WEIGHT if role == MASTER else FROM_OLDER if older else RESET
    roles = MOMENTS if role == EXP_AVG_SQ and source == RESET else (role,)
    for own in roles:
        stream = shard.streams.get(own) or shard.lost[own]
        yield Fill(stream.array, shard.label, begin, end, own, source)


def repair(path: Path, output: Path, older_path: Path | None, workers: int) -> Plan:
    """Audit, plan, and write the repaired copy; its audit is clean, or it is not there.

    Raises:
        UserError: the checkpoint is whole, or something in it cannot be repaired, or the output is there already.
    """
    if output.exists():
        raise UserError(f"{output}: expected a name for a new folder, found that it exists")
    report = audit(path, workers=workers)
    if report.verdict == WHOLE:
        raise UserError(f"{path} is whole: nothing to repair")
    older = audit(older_path, workers=workers) if older_path else None
    made = plan(report, older)
    if made.refused:
        lines = [f"  {f.kind.name} {f.array} {f.shard}: {reason}" for f, reason in made.refused]
        raise UserError("\n".join([f"{path} cannot be repaired, and nothing was written:", *lines]))
    with new_folder(output) as temporary, _without_its_list(temporary):
        _copy(path, temporary)
        _execute(made, report.checkpoint, older.checkpoint if older else None, path, temporary)
        _write_list(made, path, older_path, repaired_list(temporary))
        result = audit(temporary, workers=workers)
        if result.verdict != WHOLE:
            found = {finding.kind.name for finding in result.findings if finding.kind.severity != NOTE}
            raise UserError(f"{path} cannot be repaired: the repaired copy still has {', '.join(sorted(found))}")
        os.replace(repaired_list(temporary), repaired_list(output))
    return made


@contextmanager
def _without_its_list(temporary: Path) -> Iterator[None]:
    """The list of what was repaired lies beside the folder; one beside a folder that is gone is none."""
    try:
        yield
    finally:
        repaired_list(temporary).unlink(missing_ok=True)


def _copy(path: Path, to: Path) -> None:
    shutil.copytree(path, to, ignore=shutil.ignore_patterns(f"*{LOCKS}"))


def _execute(made: Plan, found: Checkpoint, older: Checkpoint | None, path: Path, copy: Path) -> None:
    shards = {
        (s.array, shard.label): shard for shard in found.shards for s in (*shard.streams.values(), *shard.lost.values())
    }
    for cut in made.cuts:
        os.truncate(_moved(cut.path, path, copy), cut.nbytes)
    changed: set[str] = set()
    for fill in made.fills:
        shard = shards[fill.array, fill.shard]
        source = shard.streams[WEIGHT] if fill.role == MASTER else None
        if fill.source == FROM_OLDER and older:
            same = _same(older, shard)
            source = same.streams[fill.role] if same else None
        target = shard.streams.get(fill.role) or shard.lost[fill.role]
        moved = replace_paths(target, path, copy)
        changed.update(extent.path for extent in moved.extents)
        for begin in range(fill.begin, fill.end, AT_A_TIME):
            _fill(moved, source, begin, min(begin + AT_A_TIME, fill.end))
    for record in found.records:
        if (own := _moved(record.path, path, copy)) in changed:
            checksums.update_checksum(record._replace(path=own))


def replace_paths(stream: Stream, path: Path, copy: Path) -> Stream:
    extents = tuple(extent._replace(path=_moved(extent.path, path, copy)) for extent in stream.extents)
    return stream._replace(extents=extents)


def _moved(name: str, path: Path, copy: Path) -> str:
    return str(copy / Path(name).relative_to(path))


def _fill(target: Stream, source: Stream | None, begin: int, end: int) -> None:
    """Write elements; zeros without a source. Both sides are converted through fp32."""
    if source is None:
        data = bytes((end - begin) * item_size(target.dtype))
    elif source.dtype == target.dtype:
        data = read_elements(source, begin, end).tobytes()
    else:
        values = as_float32(read_elements(source, begin, end), source.dtype)
        if values is None or target.dtype not in ("float32", "float64"):
            raise UserError(f"{target.array}: expected fp32, found {target.dtype}, which is not written")
        data = values.astype(target.dtype).tobytes()
    ends = itertools.accumulate(extent.nbytes for extent in target.extents)
    size = item_size(target.dtype)
    for extent, stop in zip(target.extents, ends, strict=True):
        start = stop - extent.nbytes
        low, high = max(begin * size, start), min(end * size, stop)
        if low < high:
            with open(extent.path, "r+b" if os.path.exists(extent.path) else "wb") as file:
                file.seek(extent.offset + low - start)
                file.write(data[low - begin * size : high - begin * size])


def _write_list(made: Plan, path: Path, older: Path | None, to: Path) -> None:
    """What was repaired, and of what."""
    content = {
        "schema": 1,
        "repaired": str(path),
        "older": str(older) if older else None,
        "ranges": [{key: value for key, value in asdict(fill).items() if key != "role"} for fill in made.fills],
        "cut": [extent.path for extent in made.cuts],
    }
    write_durably(to, (json.dumps(content, indent=1) + "\n").encode())
