"""Migrate a checkpoint: read its structure, plan, copy and judge the bytes, and rename the complete output."""

import hashlib
import io
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ckpt_patches import __version__
from ckpt_patches.audit import audit, repair_list
from ckpt_patches.audit.audit import Report
from ckpt_patches.audit.judging import recorded_states, scan
from ckpt_patches.errors import UserError
from ckpt_patches.formats import torch_dist, torch_dist_writer
from ckpt_patches.formats.checkpoint import Checkpoint
from ckpt_patches.formats.damages import DAMAGE, MIXED_ROWS, NOTE, SHIFTED_STATE, Finding
from ckpt_patches.formats.elements import PartRead
from ckpt_patches.formats.megatron_arrays import CONFIG
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.formats.torch_dist import COMMON, INDEX, Place
from ckpt_patches.formats.torch_file import storages_in
from ckpt_patches.formats.torch_writer import torch_file as written_file
from ckpt_patches.migrate import keys, move, moved_repairs, old_checkpoint
from ckpt_patches.migrate.migration_plan import OutputFile, Plan, needs_nothing, plan, source_type
from ckpt_patches.migrate.old_checkpoint import Source
from ckpt_patches.runtime.distributed import Ranks
from ckpt_patches.runtime.pause import without_garbage_collection
from ckpt_patches.runtime.shared_writing import Task, write_together
from ckpt_patches.runtime.unfinished import UnfinishedFolder, check_outside, write_at_once

MARK = ".ckpt-patches-migrate.json"
BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
MOST_SHOWN = 10  # findings


class DamagedError(UserError):
    """The checkpoint is damaged, and `damaged_as_is` is not set."""

    status = 1


class NeedsNothingError(UserError):
    """megatron-core 0.16 and later load the checkpoint as it is."""


@dataclass(frozen=True)
class Options:
    """Options of a migration."""

    workers: int | None = None  # processes; None: the rank's default
    step: int | None = None  # for all param groups; None: unchanged
    damaged_as_is: bool = False  # migrate even if elements are damaged
    trust_checkpoint: bool = False  # accept classes that are not listed; their code is never run
    sync: bool = True  # flush every file to disk before it gets its final name


@dataclass(frozen=True)
class Summary:
    """The result of a migration: on rank 0 for all ranks, on other ranks for that rank only."""

    output: str
    source_type: str
    target_type: str
    bytes: int  # written
    files: int  # written
    files_before: int  # written by an interrupted run
    seconds: float  # in total
    plan_seconds: float  # until the first byte was moved
    workers: int
    verdict: str  # the audit's; empty on ranks other than 0
    findings: tuple[Finding, ...]


def prepare(path: Path, step: int | None, *, trust: bool = False, damaged_as_is: bool = False) -> tuple[Source, Plan]:
    """Read the structure of a checkpoint and plan its migration. Writes nothing.

    Raises:
        DamagedError: something is missing, foreign or contradictory, and `damaged_as_is` is not set.
        UserError: the checkpoint cannot be migrated.
        NeedsNothingError: it needs no migration.
    """
    with without_garbage_collection():
        found = old_checkpoint.read(path, trust=trust)
        if needs_nothing(found):
            raise _nothing_to_do(found)
        checkpoint = found.found
        planned = plan(found, audit.complete(checkpoint), step)
        checkpoint.findings[:] = [own for own in checkpoint.findings if own.kind is not MIXED_ROWS]  # plan fixes these
        if not damaged_as_is:
            _check_inventory(checkpoint)
        return found, planned


def _check_inventory(found: Checkpoint) -> None:
    """Refuse a checkpoint with damage that the structure shows, before any element is read."""
    damage = [finding for finding in found.findings if finding.kind.severity == DAMAGE]
    if damage:
        more = f", and {len(damage) - 1} more (ckpt-patches audit)" if len(damage) > 1 else ""
        raise DamagedError(
            f"{found.path} is damaged or incomplete, and nothing was written: {_line(damage[0])}{more}; take an older "
            "one, or migrate it as it is with --damaged-as-is"
        )


def _line(finding: Finding) -> str:
    return " ".join(filter(None, (finding.kind.name, finding.array, finding.shard, finding.detail)))


def _nothing_to_do(found: Source) -> UserError:
    """The error for a checkpoint that needs no migration, or needs a repair first."""
    path, kind = found.found.path, source_type(found)
    more = f", its optimizer's state is {kind}" if kind else ""
    if kind == keys.RESHARDABLE:
        report = audit.audit(path)
        if any(finding.kind is SHIFTED_STATE for finding in report.findings):
            return UserError(f"{path} is shifted: repair it first (ckpt-patches repair {path} --output NEW)")
        more += "; but it is damaged, as ckpt-patches audit says" if report.verdict == audit.DAMAGED else ""
    return NeedsNothingError(f"{path} needs nothing: megatron-core 0.16 and later load it as it is{more}")


def migrate(
    path: Path,
    output: Path,
    options: Options | None = None,
    *,
    ranks: Ranks | None = None,
    warn: Callable[[str], object] = print,
) -> Summary:
    """Write a checkpoint that megatron-core 0.16 and later load. All ranks call this.

    Raises:
        DamagedError: elements are damaged. The output keeps its temporary name; `damaged_as_is` completes it.
        UserError: it cannot be migrated, the output exists, the disk is full, or a rank is missing. Written files
            stay, and the same call continues from there.
    """
    begin = time.monotonic()
    options = options or Options()
    ranks = ranks or Ranks()
    workers = options.workers or ranks.workers

    def prepared() -> tuple[Source, Plan, UnfinishedFolder]:
        check_outside(path, output)
        found, planned = prepare(
            path, options.step, trust=options.trust_checkpoint, damaged_as_is=options.damaged_as_is
        )
        folder = UnfinishedFolder(output, _fingerprint(found, planned, options), MARK, "migration")
        folder.check(planned.files)
        return found, planned, folder

    found, planned, folder = ranks.agree("planning", prepared, by=lambda made: made[2].fingerprint)
    for warning in planned.warnings if ranks.rank == 0 else ():
        warn(warning)
    job = move.Job(folder.working, planned.shards, options.sync)
    task = Task(planned.files, partial(move.writer, job), partial(_count, workers), partial(_to_read, planned))
    done = write_together(folder, task, ranks, lambda _: _finish(found, planned, folder, options, workers))
    findings = done.result
    return Summary(
        output=str(folder.final),
        source_type=planned.source_type,
        target_type=planned.target_type,
        bytes=done.written.bytes,
        files=done.written.files,
        files_before=done.written.files_before,
        seconds=time.monotonic() - begin,
        plan_seconds=done.began - begin,
        workers=done.written.workers,
        verdict=Report(found.found, findings).verdict if findings is not None else "",
        findings=findings or (),
    )


def _fingerprint(found: Source, planned: Plan, options: Options) -> str:
    """A hash of everything that the output depends on."""
    path = os.path.abspath(found.found.path)
    files = [(file.name, file.nbytes) for file in planned.files]
    data = json.dumps([__version__, path, found.files, files, options.step])
    return hashlib.sha256(data.encode()).hexdigest()


def _count(workers: int, files: Sequence[OutputFile]) -> int:
    return max(1, min(workers, len(files)))


def _to_read(planned: Plan, files: Sequence[OutputFile]) -> int:
    return sum(planned.shards[number].nbytes for file in files for number in file.shards)


def _finish(
    found: Source, planned: Plan, folder: UnfinishedFolder, options: Options, workers: int
) -> tuple[Finding, ...]:
    """Judge what was read and what was written, and rename the complete folder. Returns the findings.

    Raises:
        DamagedError: elements are damaged, and `damaged_as_is` is not set.
    """
    folder.check_complete(planned.files)
    findings = _judged(found, planned, folder.folder)
    _check_damage(found, findings, folder, options)
    if not folder.is_of_this(folder.final):
        folders = folder.clean()
        _write_rest(found, planned, folder.working)
        moved_repairs.write_list(found.found, planned, folder.working)
        findings += tuple(recorded_states.findings(found.found, folder.working, workers))
        _check_damage(found, findings, folder, options)
        folder.rename(folders, sync=options.sync)
    shutil.rmtree(folder.final / move.JUDGED, ignore_errors=True)
    (folder.final / MARK).unlink()
    return findings


def _check_damage(found: Source, findings: tuple[Finding, ...], folder: UnfinishedFolder, options: Options) -> None:
    damage = [finding for finding in findings if finding.kind.severity == DAMAGE]
    if damage and not options.damaged_as_is:
        raise _damaged(found.found.path, damage, folder)


def _judged(found: Source, planned: Plan, folder: Path) -> tuple[Finding, ...]:
    """The findings about the source, from the odd elements that the workers found."""
    checkpoint, shards = found.found, list(planned.shards)
    if not (folder / move.JUDGED).is_dir():  # an earlier run was killed at its very end
        return tuple(checkpoint.findings)
    checkpoint.repaired = repair_list.read(checkpoint).ranges
    pieces: list[PartRead] = []
    parts = move.judged_parts(folder, planned.files, len(shards))
    audit.judged(checkpoint, shards, scan.by_shard(parts, len(shards), pieces), pieces)
    return tuple(finding for finding in checkpoint.findings if finding.kind.severity != NOTE)


def _damaged(path: Path, damage: list[Finding], folder: UnfinishedFolder) -> DamagedError:
    lines = [f"  {_line(finding)}" for finding in damage[:MOST_SHOWN]]
    more = [f"  and {len(damage) - MOST_SHOWN} more"] if len(damage) > MOST_SHOWN else []
    return DamagedError(
        "\n".join(
            [
                f"{path} is damaged, and was not migrated:",
                *lines,
                *more,
                "repair it (ckpt-patches repair), or take an older one; with --damaged-as-is the same command goes on "
                f"from {folder.working}",
            ]
        )
    )


def _write_rest(found: Source, planned: Plan, folder: Path) -> None:
    """Write the files that are not in the plan, the index last."""
    write_at_once(folder / COMMON, _common(found, planned))
    write_at_once(folder / CONFIG, json.dumps({**BACKEND, "common_backend_version": 1}).encode())
    write_at_once(folder / INDEX, _index(planned))


def _common(found: Source, planned: Plan) -> bytes:
    buffer = io.BytesIO()
    with written_file(buffer, Path(COMMON).stem, planned.settings) as records, RangedFiles() as files:
        for storage in storages_in(planned.settings):
            assert found.common is not None
            data = bytearray(storage.nbytes)
            files.read(str(found.common.path), storage.offset, memoryview(data))
            records.add_storage(storage.key, storage.nbytes, [data])
    return buffer.getvalue()


def _index(planned: Plan) -> bytes:
    tensors = {own.name: torch_dist.Tensor(own.name, own.dtype, own.size, None, {}) for own in planned.tensors}
    objects: dict[str, Place] = {}
    for file in planned.files:
        begin = 0
        for item in file.items:
            place = Place(file.name, begin, item.content.nbytes)
            if item.offsets is None:
                objects[item.key] = place
            else:
                tensors[item.key].chunks[item.offsets] = item.shape
                tensors[item.key].places[item.offsets] = place
            begin += item.content.nbytes
    return torch_dist_writer.index(tensors.values(), objects)
