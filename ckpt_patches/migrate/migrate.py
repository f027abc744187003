"""Migrate a checkpoint: plan, audit, copy, write the index, and rename the complete output."""

import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ckpt_patches import __version__
from ckpt_patches.audit import audit
from ckpt_patches.audit.audit import Report
from ckpt_patches.audit.judging import recorded_states
from ckpt_patches.errors import NothingToDo, UserError
from ckpt_patches.formats.checkpoint import Checkpoint
from ckpt_patches.formats.damages import (
    DAMAGE,
    INCOMPLETE,
    MIXED_ROWS,
    NOTE,
    REPAIRED,
    SHIFTED_STATE,
    UNREADABLE,
    Finding,
)
from ckpt_patches.formats.megatron_arrays import CONFIG
from ckpt_patches.formats.torch_dist import INDEX
from ckpt_patches.migrate import output as files
from ckpt_patches.migrate.output import OutputFile
from ckpt_patches.migrate.plan import OTHER_WAY, Plan, files_in, plan, read
from ckpt_patches.runtime.distributed import Ranks
from ckpt_patches.runtime.durable import replace_durably
from ckpt_patches.runtime.pause import without_garbage_collection
from ckpt_patches.runtime.progress import shown_in_order
from ckpt_patches.runtime.unfinished import UnfinishedFolder, check_outside, check_parent

BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
BACKEND |= {"common_backend": "torch", "common_backend_version": 1}
KNOWN = (SHIFTED_STATE, MIXED_ROWS)  # damage of upstream's that a load with a fix undoes: named before other findings
STOPS = (UNREADABLE, REPAIRED)  # of findings that are no damage; the list of what was repaired is of the source's files


class DamagedError(UserError):
    """The checkpoint is damaged, and `damaged_as_is` is not set."""

    status = 1


@dataclass(frozen=True)
class Options:
    """Options of a migration."""

    workers: int | None = None  # processes; None: as many as processors
    damaged_as_is: bool = False  # migrate even if elements are damaged
    trust_checkpoint: bool = False  # accept classes that are not listed; their code is never run


@dataclass(frozen=True)
class Summary:
    """The result of a migration."""

    output: str
    source_type: str
    target_type: str
    bytes: int  # written
    files: int  # written
    files_before: int  # written by an interrupted run
    seconds: float  # in total
    plan_seconds: float  # until the first byte was copied: plan and audit
    workers: int
    verdict: str  # the audit's
    findings: tuple[Finding, ...]


def prepare(path: Path, options: Options) -> Plan:
    """Read the structure of a checkpoint and plan its migration. Writes nothing.

    Raises:
        DamagedError: something is missing, foreign or contradictory, and `damaged_as_is` is not set.
        UserError: the checkpoint cannot be migrated, or needs no migration.
    """
    with without_garbage_collection():
        old = read(path, trust=options.trust_checkpoint)
        planned = None if old.needs_nothing else plan(old)
    if planned is None:
        _check_damage(path, audit.audit(path, options.workers).findings, options)
        more = f", its optimizer's state is {old.kind}" if old.kind else ""
        raise NothingToDo(f"{path} needs nothing: megatron-core 0.16 and later load it as it is{more}")
    _check_damage(path, old.found.findings, options)
    return planned


def _check_damage(path: Path, findings: Iterable[Finding], options: Options) -> None:
    """Refuse a damaged checkpoint, and a repaired one.

    Raises:
        DamagedError: it is one, and `damaged_as_is` is not set.
    """
    if (damage := _damage(findings)) and not options.damaged_as_is:
        raise DamagedError(
            f"{path} is damaged or incomplete, or was repaired, and nothing was written: {damage}; take another "
            f"checkpoint, or {OTHER_WAY}, or migrate it as it is with --damaged-as-is"
        )


def _damage(findings: Iterable[Finding]) -> str:
    """The first finding that stops a migration, with its remedy; empty if none does."""
    damage = [own for own in findings if own.kind.severity in (DAMAGE, INCOMPLETE) or own.kind in STOPS]
    damage.sort(key=lambda own: (own.kind is REPAIRED, own.kind not in KNOWN))
    if not damage:
        return ""
    first = damage[0]
    found = " ".join(filter(None, (first.kind.name, first.array, first.shard, first.detail)))
    more = f", and {len(damage) - 1} more (ckpt-patches audit)" if len(damage) > 1 else ""
    return f"{found}{more}: {first.kind.remedy}"


def migrate(
    path: Path,
    output: Path,
    options: Options | None = None,
    *,
    ranks: Ranks | None = None,
    warn: Callable[[str], object] = print,
) -> Summary | None:
    """Write a checkpoint that megatron-core 0.16 and later load. Each of several `ranks` writes its share.

    Returns the summary on rank 0, None on the others.

    Raises:
        DamagedError: the checkpoint is damaged. Nothing was written.
        UserError: it cannot be migrated, the output exists, the disk has too little room, or a rank is missing.
        OSError: a file cannot be read or written. Written files stay, and the same call continues from there.
    """
    begin, options, ranks = time.monotonic(), options or Options(), ranks or Ranks()
    workers = options.workers or ranks.workers
    made: list[tuple[Plan, UnfinishedFolder]] = []  # on rank 0
    ranks.first("planning", lambda: made.append(_prepared(path, output, options)))
    report = audit.audit_together(path, workers, ranks)
    with ExitStack() as stack:

        def start() -> tuple[Path, list[OutputFile]]:
            assert report
            _check_damage(path, report.findings, options)
            planned, folder = made[0]
            for warning in planned.warnings:
                warn(warning)
            stack.enter_context(folder.held())
            left = {*folder.missing(sizes(planned))}
            return folder.working, [file for file in planned.files if file.name in left]

        where, missing = ranks.first("making the output folder", start)
        began = time.monotonic()

        def write() -> None:
            own = ranks.share(missing)
            for _ in shown_in_order(partial(files.write, folder=where), own, [file.nbytes for file in own], workers):
                pass

        ranks.gather("writing", write)

        def finish() -> Summary:
            assert report
            planned, folder = made[0]
            recorded = _finish(planned, folder, report.checkpoint, workers, options)
            return Summary(
                output=str(folder.final),
                source_type=planned.source.kind,
                target_type=planned.target_type,
                bytes=sum(file.nbytes for file in missing),
                files=len(missing),
                files_before=len(planned.files) - len(missing),
                seconds=time.monotonic() - begin,
                plan_seconds=began - begin,
                workers=min(workers, max(1, len(missing))),
                verdict=Report(report.checkpoint, (*report.findings, *recorded)).verdict,
                findings=(*(own for own in report.findings if own.kind.severity != NOTE), *recorded),
            )

        summary = ranks.first("finishing the output folder", finish)
    return None if ranks.rank else summary


def _prepared(path: Path, output: Path, options: Options) -> tuple[Plan, UnfinishedFolder]:
    check_outside(path, output)
    check_parent(output)
    planned = prepare(path, options)
    depends_on = json.dumps([__version__, os.path.abspath(path), planned.source.files, sizes(planned)])
    folder = UnfinishedFolder(output, "migration", depends_on, path)
    folder.check(sizes(planned))
    return planned, folder


def sizes(planned: Plan) -> dict[str, int]:
    """The bytes of each new file."""
    return {file.name: file.nbytes for file in planned.files}


def _finish(
    planned: Plan, folder: UnfinishedFolder, audited: Checkpoint, workers: int, options: Options
) -> list[Finding]:
    """Write what is not in the plan, and rename the complete folder. Returns findings about what was written.

    Raises:
        DamagedError: states are not as recorded by the run that saved them, and `damaged_as_is` is not set.
        UserError: the source has changed.
    """
    working = folder.working
    replace_durably(working / CONFIG, json.dumps(BACKEND).encode())
    replace_durably(working / INDEX, files.index(planned.tensors, planned.files))
    findings = [*recorded_states.findings(audited, working, workers)]
    if (wrong := _damage(findings)) and not options.damaged_as_is:
        raise DamagedError(f"{working} is not what was recorded: {wrong}; remove it, and begin anew")
    if files_in(audited.path) != planned.source.files:
        raise UserError(f"{audited.path} has changed while it was migrated: run the same command again")
    folder.finish(sizes(planned))
    return findings
