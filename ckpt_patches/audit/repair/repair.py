"""Repair a copy of a checkpoint, and audit the copy. The original is not changed."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_patches.audit import repair_list
from ckpt_patches.audit.audit import REPAIRED, TO_RESUME_FROM, WHOLE, audit
from ckpt_patches.audit.judging import record_checksums
from ckpt_patches.audit.ranges import Range
from ckpt_patches.audit.repair import same_run
from ckpt_patches.audit.repair.copies import copy_checkpoint, new_copy, write_elements
from ckpt_patches.audit.repair.plan import FROM_OLDER, RESET, Fill, pieces, places_in, plan
from ckpt_patches.audit.repair_list import NAME, Repaired
from ckpt_patches.audit.run_folder import saves, unit_of
from ckpt_patches.errors import NothingToDo, UserError
from ckpt_patches.formats.checkpoint import WEIGHT, Checkpoint
from ckpt_patches.formats.damages import NOTE
from ckpt_patches.formats.dtypes import item_size
from ckpt_patches.formats.elements import Block, as_float32, read_elements
from ckpt_patches.formats.reading import reader_of
from ckpt_patches.runtime.durable import sync_all, sync_folder
from ckpt_patches.runtime.shown import shown

SCHEMA = 3  # of the JSON; raised when a key is renamed, removed or changes its meaning


@dataclass(frozen=True)
class Result:
    """What a repair has changed in the copy, which is REPAIRED, and the source of moments."""

    output: Path
    now: Repaired
    older: Checkpoint | None

    def as_text(self) -> str:
        now = self.now
        lines = [f"{' '.join(key)}: {now.elements(key)} elements: {now.sources[key]}" for key in now.ranges]
        changed = f"{sum(map(now.elements, now.ranges))} elements repaired, no other changed"
        lines.append(f"{self.output} is {REPAIRED}: {changed}; they are listed in it ({NAME})")
        return "\n".join([*lines, "to resume from it, give it the name and place of the damaged one"])

    def as_json(self) -> dict[str, Any]:
        now, older = self.now, self.older
        return {
            "schema": SCHEMA,
            "output": str(self.output),
            "source": {"path": str(older.path), "step": older.step} if older else None,
            "repaired": [
                {"array": key[0], "shard": key[1], "source": now.sources[key], "elements": now.elements(key)}
                for key in now.ranges
            ],
            "verdict": REPAIRED,
        }


def repair(
    path: Path,
    output: Path,
    older_path: Path | None,
    workers: int,
    *,
    reset_moments: bool = False,
    say: Callable[[str], object] = lambda line: None,
) -> Result:
    """Audit, plan, write the repaired copy, and audit it. Only damaged elements change, and moments that are reset.

    Raises:
        NothingToDo: the checkpoint is complete.
        UserError: something in it cannot be repaired, or what is right would be a guess; or a checkpoint in the folder,
            which is resumed from with it, is not good; or the output exists; or the older checkpoint is damaged, or not
            known to be of the same run.
    """
    with new_copy(path, output, older_path) as copy:
        _check_parts(path, workers)
        report = audit(path, workers)
        found, older = report.checkpoint, None
        if report.verdict in TO_RESUME_FROM:
            raise NothingToDo(f"{path} is {report.verdict}: nothing to repair")
        if older_path:
            older = _source(found, older_path, workers)
        fills = plan(report, FROM_OLDER if older else RESET)
        if not reset_moments and any(fill.source == RESET for fill in fills):
            raise UserError(
                f"{path}: expected a source of lost moments, found none, and nothing was written: repeat with --from "
                f"{_neighbor(found, workers) or 'OLDER'}, a whole checkpoint of the run, or with --reset-moments, "
                "which sets both moments of these elements to zero"
            )
        copy_checkpoint(path, copy, output, say)
        now = _change(copy, fills, older)
        result = audit(copy, workers)
        if result.verdict != REPAIRED:
            left = sorted({finding.kind.name for finding in result.findings if finding.kind.severity != NOTE})
            raise UserError(f"{path} cannot be repaired, and nothing was written: the copy still has {', '.join(left)}")
        sync_all(copy)
        os.replace(copy, output)
        sync_folder(output.parent)
        return Result(output, now, older)


def _check_parts(path: Path, workers: int) -> None:
    """Refuse a folder with other checkpoints, from which a run resumes as one, if one of them is not good.

    Raises:
        UserError: one is not.
    """
    parts = [part for part in saves(path) if part != path and unit_of(part, path) == path]
    for part, verdict in ((part, audit(part, workers).verdict) for part in parts):
        if verdict not in TO_RESUME_FROM:
            raise UserError(
                f"{path} cannot be repaired, and nothing was written: a run resumes from it together with {part}, "
                f"which is {verdict}: repair that one, or take another checkpoint"
            )


def _source(found: Checkpoint, path: Path, workers: int) -> Checkpoint:
    """The older checkpoint.

    Raises:
        UserError: it is damaged, or not known to be of the same run.
    """
    report = audit(path, workers)
    same_run.check(found, report.checkpoint)
    if report.verdict not in TO_RESUME_FROM:
        raise UserError(
            f"--from {path}: expected a checkpoint that is {WHOLE}, found it {report.verdict} (audit {path})"
        )
    return report.checkpoint


def _neighbor(found: Checkpoint, workers: int) -> Path | None:
    """The newest older checkpoint in the run's folder that is whole."""
    path = found.path.resolve()
    save = unit_of(path, path.parent)
    older: list[tuple[int, Path]] = []
    for other in (entry / path.relative_to(save) for entry in save.parent.iterdir()):
        with suppress(Exception):  # it is no checkpoint, or not of the run
            reader = reader_of(other)
            same_run.check(found, source := reader(other) if reader else found)
            older.append((source.step or 0, other))
    return next((other for _, other in sorted(older, reverse=True) if audit(other, workers).verdict == WHOLE), None)


def _change(copy: Path, fills: list[Fill], older: Checkpoint | None) -> Repaired:
    """Fill the elements in the copy, and write the repair list into it. Returns what has changed."""
    reader = reader_of(copy)
    assert reader is not None  # it is what the audited one is
    found, now = reader(copy), Repaired()
    places = places_in(found)
    listed = repair_list.read(found)
    source = same_run.tensors(older) if older else {}
    changed = set[str]()
    for fill in fills:
        target = Fill(places[fill.stream.array, fill.shard.label][0], fill.role, fill.source, fill.ranges)
        where = f": {older.path}, step {older.step}" if older and fill.source == FROM_OLDER else ""
        ranges = [*_filled(target, source)]
        # Lost elements that stay zero are not the run's own.
        own = fill.ranges if ranges or fill.source == RESET else []
        for each in (now, listed):
            each.add((fill.stream.array, fill.shard.label), own, f"{fill.source}{where}")
        changed |= {extent.path for extent in target.stream.extents if ranges}
    for record in found.records:
        if record.path in changed:
            record_checksums.update_checksum(record)
    listed.files += [str(Path(name).relative_to(copy)) for name in changed]
    repair_list.write(copy, listed)
    return now


def _filled(fill: Fill, source: same_run.Tensors) -> Iterator[Range]:
    """Fill the ranges. Yields the ranges of elements that change."""
    for first, last in pieces(fill.ranges):
        data = _content(fill, source, first, last).view(np.uint8)
        differs = np.ones(last - first, np.bool_)
        if fill.role not in fill.shard.lost:  # those have none of their own
            there = read_elements(fill.stream, first, last).view(np.uint8)
            differs = (there != data).reshape(last - first, -1).any(axis=1)
        edges = (first + np.flatnonzero(np.diff(differs, prepend=False, append=False))).tolist()
        write_elements(fill.stream, first, data.data)
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
