"""Convert a checkpoint: read its headers, plan, check, move the bytes, and give the result its name."""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ckpt_patches.convert import read_headers, traits
from ckpt_patches.convert.conversion_plan import plan
from ckpt_patches.convert.file_systems import Direct, writes_directly
from ckpt_patches.convert.output_files import Plan
from ckpt_patches.convert.output_folder import OutputFolder, fingerprint
from ckpt_patches.convert.source_files import Access
from ckpt_patches.convert.workers import shares, worker_count, write_all
from ckpt_patches.convert.write import Job
from ckpt_patches.errors import UserError
from ckpt_patches.fingerprint import record_files
from ckpt_patches.runtime.distributed import Ranks
from ckpt_patches.runtime.progress import Progress
from ckpt_patches.runtime.unfinished import Written

WORKERS = 8  # on two cores, too: where one waits for the disk another goes on
MOST_SHOWN = 12  # states that are not as recorded
BYTES_IN_FLIGHT = 16 << 20  # larger buffers are no faster, and do not fit into a processor's cache


@dataclass(frozen=True)
class Options:
    """How to convert."""

    workers: int = WORKERS  # processes
    bytes_in_flight: int = BYTES_IN_FLIGHT  # in the buffers of all workers together
    access: Access = "read"  # to the rank files: by ranges, or mapped into memory
    strict: bool = True  # refuse patterns without a parameter, and fragments that do not follow on one another
    inject_missing_state: bool = False  # convert although the checkpoint has no universal_checkpoint_info
    trust_checkpoint: bool = False  # let classes pass that are not listed; nothing of them is run
    direct: Direct = "auto"  # write past the page cache: on local file systems, everywhere, nowhere
    sync: bool = True  # have every file on the disk before it gets its name: for power failures


@dataclass(frozen=True)
class Summary:
    """What was done; on rank 0 by all ranks, on each other by that one."""

    output_folder: str
    bytes: int  # written
    files: int  # written
    files_before: int  # already there, of an interrupted run
    links: int  # further names of files
    seconds: float  # in all
    plan_seconds: float  # of it until the first byte was moved
    rate: float  # bytes a second while bytes were moved
    workers: int


def convert(
    input_folder: str | Path,
    output_folder: str | Path,
    options: Options | None = None,
    *,
    ranks: Ranks | None = None,
    begin: float | None = None,
    warn: Callable[[str], object] = print,
) -> Summary:
    """Convert a ZeRO checkpoint folder (`OUT/global_step10`) to a universal one, with `latest_universal` beside it.

    Each of several `ranks` calls this, and writes its share. `begin` is when the program began, on time.monotonic's
    clock.

    Raises:
        UserError: the checkpoint is damaged or of a kind that is not converted here, the output folder exists, the disk
            is full, a rank is missing. What was written stays, and the same call goes on from there.
    """
    begin = time.monotonic() if begin is None else begin
    options = options or Options()
    ranks = ranks or Ranks()
    plan_of_all, folder = ranks.agree(
        "planning",
        lambda: prepare(Path(input_folder), Path(output_folder), options),
        by=lambda made: made[1].fingerprint,
    )
    for warning in plan_of_all.warnings if ranks.rank == 0 else ():
        warn(warning)
    with ExitStack() as stack:

        def take() -> None:
            folder.begin()
            stack.enter_context(folder.held())

        def finish() -> None:
            check = partial(_check_recorded, Path(input_folder), strict=options.strict, warn=warn)
            folder.finish(plan_of_all, check, sync=options.sync)

        ranks.first("making the output folder", take)
        planning = time.monotonic() - begin
        written = ranks.gather("writing", lambda: _write_share(plan_of_all, folder, options, ranks))
        ranks.first("finishing the output folder", finish)
    seconds = time.monotonic() - begin
    nbytes = sum(own.bytes for own in written)
    return Summary(
        output_folder=str(folder.final),
        bytes=nbytes,
        files=sum(own.files for own in written),
        files_before=sum(own.files_before for own in written),
        links=len(plan_of_all.links) if ranks.rank == 0 else 0,
        seconds=seconds,
        plan_seconds=planning,
        rate=nbytes / max(seconds - planning, 1e-9),
        workers=sum(own.workers for own in written),
    )


def _check_recorded(source: Path, made: Path, *, strict: bool, warn: Callable[[str], object]) -> None:
    """Hold what was written against what the run that saved has recorded, if it has.

    Raises:
        UserError: it is not that; unless not `strict`.
    """
    plain = record_files.of_deepspeed(source)
    if plain is None:
        return
    if record_files.of_deepspeed(made) != plain:
        raise UserError(f"{made}: expected the record of {source}, found another one or none")
    try:
        from ckpt_patches.fingerprint import offline, universal_states
    except ModuleNotFoundError as error:
        warn(f"what was written was not compared with what the run has recorded: {error.name} is not installed")
        return
    checked = offline.check(plain, universal_states.fingerprints(made, trust=True))
    warn(checked.sentence())
    if checked.differences and strict:
        lines = [f"  {one.parameter} {one.state}: {one.what}" for one in checked.differences[:MOST_SHOWN]]
        raise UserError(
            "\n".join(
                [
                    f"{source} is not what the run recorded when it saved, and was not converted:",
                    *lines,
                    "take another checkpoint; --no-strict converts it as it is, which one that was repaired needs",
                ]
            )
        )


def prepare(input_folder: Path, output_folder: Path, options: Options) -> tuple[Plan, OutputFolder]:
    """Everything that is found out before the first byte is written."""
    known, warning = traits.installed()
    found = planned(input_folder, known, options)
    found = replace(found, warnings=(*([warning] if warning else []), *found.warnings))
    folder = OutputFolder(output_folder, fingerprint(found, known, options.strict))
    folder.check()
    folder.check_space(folder.missing(found.outputs))
    return found, folder


def planned(input_folder: Path, known: traits.Traits, options: Options) -> Plan:
    """The plan for a checkpoint's folder, of which the headers are read.

    Raises:
        UserError: the checkpoint is damaged, or of a kind that is not converted here.
    """
    try:
        found = read_headers.read(
            input_folder, known, trust=options.trust_checkpoint, inject_missing_state=options.inject_missing_state
        )
        return plan(found, known, strict=options.strict)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # a dict where a list should be
        raise UserError(f"{input_folder} is not laid out as DeepSpeed does: {type(error).__name__}: {error}") from error


def _write_share(planned: Plan, folder: OutputFolder, options: Options, ranks: Ranks) -> Written:
    """Write those files of this rank's share that are not there."""
    own = shares(planned.outputs, ranks.size)[ranks.rank]
    left = folder.missing(own)
    paths = [file.path for file in planned.files]
    direct = writes_directly(folder.working, options.direct, sync=options.sync)
    job = Job(folder.working, paths, options.access, options.bytes_in_flight, options.sync, direct)
    # In the page cache, more of them than processors get into each other's way; on two it takes twice the time.
    most = options.workers if options.sync else min(options.workers, len(os.sched_getaffinity(0)))
    count = worker_count(left, most)
    nbytes = sum(output.nbytes for output in left)
    with Progress(nbytes) as progress:
        write_all(left, job, count, progress.show, Progress.INTERVAL)
    return Written(nbytes, len(left), len(own) - len(left), count)
