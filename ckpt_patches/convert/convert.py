"""Convert a checkpoint: read its headers, plan, check, copy the bytes, and rename the result."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ckpt_patches import __version__
from ckpt_patches.convert import momenta, traits
from ckpt_patches.convert.conversion_plan import plan
from ckpt_patches.convert.new_file import Direct, writes_directly
from ckpt_patches.convert.output_files import Output, Plan
from ckpt_patches.convert.traits import Traits
from ckpt_patches.convert.write import Job, writer
from ckpt_patches.errors import UserError
from ckpt_patches.fingerprint import record_files
from ckpt_patches.formats import zero_checkpoint
from ckpt_patches.runtime.distributed import Ranks
from ckpt_patches.runtime.shared_writing import Task, cost, write_together
from ckpt_patches.runtime.unfinished import UnfinishedFolder, check_outside, reported, write_at_once

WORKERS = 8  # on two cores, too: while one waits for the disk, another works
WORTH_A_PROCESS = 64 << 20  # bytes; starting a process takes as long as copying these
MOST_SHOWN = 12  # states that differ from the recorded ones
BYTES_IN_FLIGHT = 16 << 20  # larger buffers are not faster, and exceed a processor's cache
MARK = ".ds_to_universal.json"
LATEST = "latest_universal"


@dataclass(frozen=True)
class Options:
    """How to convert."""

    workers: int = WORKERS  # processes
    bytes_in_flight: int = BYTES_IN_FLIGHT  # in the buffers of all workers together
    strict: bool = True  # refuse patterns that match no parameter, and fragments that are not consecutive
    inject_missing_state: bool = False  # convert even without universal_checkpoint_info
    trust_checkpoint: bool = False  # accept classes that are not listed; their code is never run
    direct: Direct = "auto"  # bypass the page cache: on local file systems, always, never
    sync: bool = True  # sync every file before its rename, for power failures


@dataclass(frozen=True)
class Summary:
    """What was done: on rank 0 by all ranks, on other ranks by the own rank."""

    output_folder: str
    bytes: int  # written
    files: int  # written
    files_before: int  # written by an interrupted run
    links: int  # additional names of files
    seconds: float  # total
    plan_seconds: float  # of the total, until the first byte was copied
    rate: float  # bytes per second while copying
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

    Each of several `ranks` calls this, and writes its share. `begin` is the start of the program, on the clock of
    time.monotonic.

    Raises:
        UserError: the checkpoint is damaged or of an unsupported kind, the output folder exists, the disk is full, or a
            rank is missing. Written files stay, and the same call continues from there.
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
    direct = writes_directly(folder.working, options.direct, sync=options.sync)
    paths = [file.path for file in plan_of_all.files]
    job = Job(folder.working, paths, options.bytes_in_flight, options.sync, direct)
    task = Task(plan_of_all.outputs, partial(writer, job), partial(_workers, options), _nbytes)
    check = partial(_check_recorded, Path(input_folder), strict=options.strict, warn=warn)
    done = write_together(folder, task, ranks, lambda: _finish(folder, plan_of_all, check, sync=options.sync))
    end = time.monotonic()
    return Summary(
        output_folder=str(folder.final),
        bytes=done.written.bytes,
        files=done.written.files,
        files_before=done.written.files_before,
        links=len(plan_of_all.links) if ranks.rank == 0 else 0,
        seconds=end - begin,
        plan_seconds=done.began - begin,
        rate=done.written.bytes / max(end - done.began, 1e-9),
        workers=done.written.workers,
    )


def prepare(input_folder: Path, output_folder: Path, options: Options) -> tuple[Plan, UnfinishedFolder]:
    """Plan, and check everything that can be checked before the first byte is written."""
    check_outside(input_folder, output_folder)
    known, warning = traits.installed()
    found = planned(input_folder, known, options)
    found = replace(found, warnings=(*([warning] if warning else []), *found.warnings))
    folder = UnfinishedFolder(output_folder, fingerprint(found, known, options.strict), MARK, "conversion")
    folder.check(found.outputs)
    return found, folder


def planned(input_folder: Path, known: Traits, options: Options) -> Plan:
    """Read a checkpoint's headers and plan its conversion.

    Raises:
        UserError: the checkpoint is damaged, or of an unsupported kind.
    """
    found = zero_checkpoint.read(
        input_folder, trust=options.trust_checkpoint, inject_missing_state=options.inject_missing_state
    )
    try:
        made = plan(found, known, strict=options.strict)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # in values that only the plan reads
        raise UserError(f"{input_folder} is not laid out as DeepSpeed does: {type(error).__name__}: {error}") from error
    return replace(made, warnings=(*made.warnings, *momenta.unlike(found, strict=options.strict)))


def fingerprint(plan: Plan, traits: Traits, strict: bool) -> str:
    """A digest of everything that the output depends on, with the mtimes of the checkpoint's files."""
    files = [(os.path.abspath(file.path), file.size, file.mtime_ns) for file in plan.files]
    data = json.dumps([__version__, files, sorted(vars(traits).items()), strict])
    return hashlib.sha256(data.encode()).hexdigest()


def _nbytes(outputs: Sequence[Output]) -> int:
    return sum(output.nbytes for output in outputs)


def _workers(options: Options, outputs: Sequence[Output]) -> int:
    """The number of processes that is efficient for these outputs."""
    # Through the page cache, more processes than processors slow each other down: twice the time on two processors.
    most = options.workers if options.sync else min(options.workers, len(os.sched_getaffinity(0)))
    return max(1, min(most, len(outputs), sum(map(cost, outputs)) // WORTH_A_PROCESS))


def _finish(folder: UnfinishedFolder, planned: Plan, check: Callable[[Path], object], *, sync: bool) -> None:
    """Rename the complete folder, if `check` raises nothing, then write `latest_universal`.

    Raises:
        UserError: a file is missing.
    """
    folder.check_complete(planned.outputs)
    if not folder.is_of_this(folder.final):
        folders = folder.clean()
        for link in planned.links:
            _link(folder.working / link.file, folder.working / link.name)
        check(folder.working)
        folder.rename(folders, sync=sync)
    write_at_once(folder.final.parent / LATEST, folder.final.name.encode())
    (folder.final / MARK).unlink()


def _link(file: Path, name: Path) -> None:
    """Create a hard link to a small file; if the file system does not support it, copy the file."""
    with reported(name):
        try:
            os.link(file, name)
        except OSError:
            if not name.is_file():  # it is from an interrupted run
                write_at_once(name, file.read_bytes())


def _check_recorded(source: Path, made: Path, *, strict: bool, warn: Callable[[str], object]) -> None:
    """Compare what was written with the fingerprints that the run recorded at the save, if it did.

    Raises:
        UserError: the output lacks the run's record; or with `strict`, a state differs from it.
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
