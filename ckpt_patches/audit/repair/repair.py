"""Repair a copy of a checkpoint, and audit the copy. The original is not changed."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ckpt_patches.audit import repair_list
from ckpt_patches.audit.audit import TO_RESUME_FROM, WHOLE, Report, audit
from ckpt_patches.audit.judging import record_checksums
from ckpt_patches.audit.judging.record_checksums import of_checksum
from ckpt_patches.audit.ranges import Range
from ckpt_patches.audit.repair import same_run
from ckpt_patches.audit.repair.copies import copied, copy_checkpoint, in_copy, new_copy, write_elements
from ckpt_patches.audit.repair.plan import AT_A_TIME, FROM_OLDER, RESET, Fill, Plan, plan
from ckpt_patches.audit.repair_list import Repaired
from ckpt_patches.audit.run_folder import unit_of
from ckpt_patches.errors import NothingToDo, UserError
from ckpt_patches.formats import damages
from ckpt_patches.formats.checkpoint import WEIGHT, Checkpoint, Stream
from ckpt_patches.formats.damages import NOTE, Finding
from ckpt_patches.formats.dtypes import item_size
from ckpt_patches.formats.elements import Block, as_float32, read_elements
from ckpt_patches.formats.paths import path_within
from ckpt_patches.formats.reading import reader_of
from ckpt_patches.runtime.durable import sync_all, sync_folder
from ckpt_patches.runtime.shown import shown

LEFT = "nothing else is known of these elements, and zeros over zeros repair nothing"


@dataclass(frozen=True)
class Result:
    """What a repair has written. `verdict` and `left` are of the audit of the copy."""

    older: Checkpoint | None
    made: Plan
    now: Repaired
    verdict: str = ""
    left: tuple[tuple[Finding, str], ...] = ()  # with the reason; if any, the copy is not REPAIRED


def repair(
    path: Path,
    output: Path,
    older_path: Path | None,
    workers: int,
    *,
    reset_moments: bool = False,
    trust_source: bool = False,
    say: Callable[[str], object] = lambda line: None,
) -> Result:
    """Audit, plan, write the repaired copy, and audit it. Only damaged elements change, and moments that are reset.

    Raises:
        NothingToDo: the checkpoint is complete.
        UserError: nothing in it can be repaired, or what is right would be a guess; or the
            output exists; or the older checkpoint is damaged, or not known to be of the same run.
    """
    with new_copy(path, output) as copy:
        report = audit(path, workers)
        found = report.checkpoint
        if report.verdict in TO_RESUME_FROM:
            raise NothingToDo(f"{path} is {report.verdict}: nothing to repair")
        older = audit(older_path, workers) if older_path else None
        source = older.checkpoint if older else None
        if older:
            same_run.check(found, older.checkpoint, trust=trust_source)
            if older.verdict not in TO_RESUME_FROM:
                expected = f"expected a checkpoint that is {WHOLE}, found it {older.verdict} (audit {older_path})"
                raise UserError(f"--from {older_path}: {expected}")
        made = plan(report, FROM_OLDER if older else RESET)
        if made.refused and not made.is_possible:
            lines = [f"  {f.kind.name} {f.array} {f.shard}: {reason or f.detail}" for f, reason in made.refused]
            raise UserError("\n".join([f"{path} cannot be repaired, and nothing was written:", *lines]))
        reset = next((fill for fill in made.fills if fill.source == RESET), None)
        if reset and not reset_moments:
            resetting = "or with --reset-moments, which sets both moments of these elements to zero"
            if not any(map(_resets_any, made.fills)):
                resetting = "as these moments are zero already, so that --reset-moments repairs nothing"
            raise UserError(
                f"{path}: expected a source of lost moments, as of {shown(reset.stream.array)}, found none, and "
                f"nothing was written: repeat with --from {_neighbor(found, workers) or 'OLDER'}, a whole checkpoint "
                f"of the run, {resetting}"
            )
        copy_checkpoint(path, copy, output, say)
        written = Result(source, made, _change(found, made, source, copy))
        return _finish(report, written, audit(copy, workers), output)


def _resets_any(fill: Fill) -> bool:
    """Whether a reset changes an element, or writes one that is absent."""
    if fill.source != RESET or fill.role in fill.shard.lost:
        return fill.source == RESET
    pieces = ((n, min(n + AT_A_TIME, end)) for begin, end in fill.ranges for n in range(begin, end, AT_A_TIME))
    return any(read_elements(fill.stream, *piece).view(np.uint8).any() for piece in pieces)


def _neighbor(found: Checkpoint, workers: int) -> Path | None:
    """The newest older checkpoint in the run's folder that is whole."""
    path = found.path.resolve()
    save, older = unit_of(path, path.parent), []
    for other in (entry / path.relative_to(save) for entry in save.parent.iterdir()):
        with suppress(Exception):  # it is no checkpoint, or none that can be a source
            reader = reader_of(other)
            same_run.check(found, source := reader(other) if reader else found, trust=False)
            older.append((source.step or 0, other))
    return next((other for _, other in sorted(older, reverse=True) if audit(other, workers).verdict == WHOLE), None)


def _change(found: Checkpoint, made: Plan, older: Checkpoint | None, copy: Path) -> Repaired:
    """Apply the plan to the copy, and write the repair list into it. Returns what has changed."""
    now = Repaired()
    changed = set[str]()
    source = same_run.tensors(older) if older else {}
    for fill in made.fills:
        own = copied(fill.stream, found.path, copy)
        ranges = [part for begin, end in fill.ranges for part in _fill(fill, source, own, begin, end)]
        where = f": {older.path}, step {older.step}" if older and fill.source == FROM_OLDER else ""
        now.add((own.array, fill.shard.label), ranges, f"{fill.source}{where}")
        changed |= {extent.path for extent in own.extents if ranges}
    for one in made.copies:
        changed |= {str(shutil.copy2(path_within(copy, one.name), path_within(copy, name))) for name in one.missing}
    if not changed:
        raise UserError(f"{found.path} cannot be repaired, and nothing was written: {LEFT}")
    wrong = {finding.detail for finding, _ in made.refused}  # includes wrong checksums, which stay
    for record in found.records:
        if (name := in_copy(record.path, found.path, copy)) in changed and of_checksum(record) not in wrong:
            record_checksums.update_checksum(record._replace(path=name))
    listed = repair_list.read(replace(found, findings=[]))
    for key, ranges in now.ranges.items():
        listed.add(key, ranges, now.sources[key])
    listed.copied += [{"from": one.name, "to": list(one.missing)} for one in made.copies]
    listed.files += [str(Path(name).relative_to(copy)) for name in changed]
    repair_list.write(copy, listed)
    return now


def _fill(fill: Fill, source: same_run.Tensors, own: Stream, begin: int, end: int) -> Iterator[Range]:
    """Fill a range of elements in the copy's stream. Yields the ranges of elements that change."""
    for first in range(begin, end, AT_A_TIME):
        last = min(first + AT_A_TIME, end)
        data = _content(fill, source, first, last).view(np.uint8)
        differs = np.ones(last - first, np.bool_)
        if fill.role not in fill.shard.lost and fill.kind is not damages.SHIFTED_STATE:  # those have none of their own
            there = read_elements(own, first, last).view(np.uint8)
            differs = (there != data).reshape(last - first, -1).any(axis=1)
        edges = (first + np.flatnonzero(np.diff(differs, prepend=False, append=False))).tolist()
        write_elements(own, first, data.data)
        yield from zip(edges[::2], edges[1::2], strict=True)


def _content(fill: Fill, source: same_run.Tensors, begin: int, end: int) -> Block:
    """The elements to write. Weights are converted through fp32."""
    dtype = fill.stream.dtype
    if fill.source == RESET:
        return np.zeros((end - begin) * item_size(dtype), np.uint8)
    if fill.source == FROM_OLDER:
        found = same_run.read(source, fill.shard, fill.stream, begin, end)
        if found is None:
            raise UserError(f"--from: expected elements of {shown(fill.stream.array)}, of torch.{dtype}, found none")
        return found
    weight = fill.shard.streams[WEIGHT]
    data = read_elements(weight, begin, end)
    if weight.dtype == dtype:
        return data
    values = as_float32(data, weight.dtype)
    if values is None or dtype not in ("float32", "float64"):
        raise UserError(f"{fill.stream.array}: expected main parameters in fp32, found {dtype}, which is not written")
    return values.astype(dtype)


def _finish(report: Report, written: Result, result: Report, output: Path) -> Result:
    """Give the copy its name. What its audit finds is left; the list of repaired elements must hide nothing else."""
    reasons = {_key(finding, report): reason for finding, reason in written.made.refused}
    left = {_key(f, result): f for f in result.findings if f.kind.severity != NOTE}
    if gone := sorted({kind for kind, *_ in reasons.keys() - left.keys()}):
        path = report.checkpoint.path
        raise UserError(f"{path} cannot be repaired: the repaired copy would hide {', '.join(gone)}")
    sync_all(result.checkpoint.path)
    os.replace(result.checkpoint.path, output)
    sync_folder(output.parent)
    named = tuple((replace(f, array=key[1]), reasons.get(key, LEFT)) for key, f in left.items())
    return replace(written, verdict=result.verdict, left=named)


def _key(finding: Finding, report: Report) -> tuple[str, str, str]:
    """A key of a finding, the same in a checkpoint and in its copy."""
    return finding.kind.name, finding.array.removeprefix(f"{report.checkpoint.path}/"), finding.shard
