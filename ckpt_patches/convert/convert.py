"""Convert a checkpoint: read its headers, plan, check, copy the bytes, and rename the result."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from ckpt_patches import __version__
from ckpt_patches.convert import reading, source
from ckpt_patches.convert.conversion_plan import Output, Plan, plan
from ckpt_patches.convert.write import Writer, batches
from ckpt_patches.errors import UserError
from ckpt_patches.fingerprint import record_files
from ckpt_patches.runtime.distributed import Ranks
from ckpt_patches.runtime.processes import in_order
from ckpt_patches.runtime.progress import Progress
from ckpt_patches.runtime.unfinished import UnfinishedFolder, check_outside, reported, write_at_once

WORKERS = 8  # on two cores, too: while one waits for the disk, another works
WORTH_A_PROCESS = 64 << 20  # bytes; starting a process takes as long as copying these
COST_OF_A_FILE = 1 << 18  # bytes that can be moved in the time that it takes to create a file
MOST_SHOWN = 12  # states that differ from the recorded ones
MARK = ".ds_to_universal.json"
LATEST = "latest_universal"


@dataclass(frozen=True)
class Options:
    """How to convert."""

    workers: int = WORKERS  # processes
    strict: bool = True  # refuse patterns that match no parameter, and states that are not as recorded
    inject_missing_state: bool = False  # convert several tensor-parallel ranks without universal_checkpoint_info
    trust_checkpoint: bool = False  # accept classes that are not listed; their code is never run
    drop_state: tuple[str, ...] = ()  # names of the optimizer's states to leave out
    skip_lost: bool = False  # leave out states that cannot be converted, as fingerprints do


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
    made: list[tuple[Plan, UnfinishedFolder]] = []

    def start() -> None:
        made.append(prepare(Path(input_folder), Path(output_folder), options))
        for warning in made[0][0].warnings if ranks.rank == 0 else ():
            warn(warning)

    with ExitStack() as stack:
        ranks.gather("planning", start)
        planned, folder = made[0]

        def take() -> None:
            folder.begin()
            stack.enter_context(folder.held())

        ranks.first("making the output folder", take)
        began = time.monotonic()
        written = ranks.gather("writing", lambda: _write(planned, folder, options, ranks))

        def finish() -> None:
            reading.check(planned.records, (seen for own in written for seen in own.seen))
            _finish(folder, planned, partial(_check_recorded, Path(input_folder), strict=options.strict, warn=warn))

        ranks.first("finishing the output folder", finish)
    end = time.monotonic()
    nbytes = sum(own.bytes for own in written)
    return Summary(
        output_folder=str(folder.final),
        bytes=nbytes,
        files=sum(own.files for own in written),
        files_before=sum(own.files_before for own in written),
        links=len(planned.links) if ranks.rank == 0 else 0,
        seconds=end - begin,
        plan_seconds=began - begin,
        rate=nbytes / max(end - began, 1e-9),
        workers=sum(own.workers for own in written),
    )


@dataclass(frozen=True)
class Written:
    """What one rank and its workers wrote."""

    bytes: int
    files: int
    files_before: int  # of an interrupted run
    workers: int
    seen: Sequence[reading.Seen]  # of the workers


def _write(planned: Plan, folder: UnfinishedFolder, options: Options, ranks: Ranks) -> Written:
    """Write the missing files of this rank's share.

    Raises:
        UserError: a file cannot be read or written, or rank 0 writes another folder.
        WorkerDefect: see `ckpt_patches.runtime.processes`.
    """
    if ranks.rank:  # on rank 0, to read the mark would end the lock that it holds
        _check_of_rank_0(folder, planned)
    own = ranks.share(sorted(planned.outputs, key=lambda output: (-output.nbytes, output.name)))
    left = folder.missing(own)
    count = max(1, min(options.workers, len(left), sum(map(_cost, left)) // WORTH_A_PROCESS))
    seen, done = [], 0
    with Progress(sum(output.nbytes for output in left)) as progress:
        for nbytes, found in in_order(Writer(folder.working, planned.records), [*batches(left)], count):
            seen.append(found)
            done += nbytes
            progress.show(done)
    return Written(done, len(left), len(own) - len(left), count, seen)


def _check_of_rank_0(folder: UnfinishedFolder, planned: Plan) -> None:
    folder.check(planned.outputs)
    if not folder.is_of_this(folder.folder):
        raise UserError(
            f"{folder.working}: expected the folder that rank 0 has made, found none: is it on this host as well, and "
            "have all ranks the same arguments?"
        )


def _cost(output: Output) -> int:
    return output.nbytes + COST_OF_A_FILE


def prepare(input_folder: Path, output_folder: Path, options: Options) -> tuple[Plan, UnfinishedFolder]:
    """Plan, and check everything that can be checked before the first byte is written."""
    source.check_folder(input_folder)
    check_outside(input_folder, output_folder)
    digest = fingerprint(input_folder, options)
    found = planned(input_folder, options)
    folder = UnfinishedFolder(output_folder, digest, MARK, "conversion")
    folder.check(found.outputs)
    return found, folder


def planned(input_folder: Path, options: Options) -> Plan:
    """Read a checkpoint's headers and plan its conversion.

    Raises:
        UserError: the checkpoint is damaged, or of an unsupported kind.
    """
    trust, inject = options.trust_checkpoint, options.inject_missing_state
    try:
        found = source.read(input_folder, trust=trust, inject_missing_state=inject)
        made = plan(found, strict=options.strict, drop=options.drop_state, skip_lost=options.skip_lost)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # such as a dict instead of a list
        raise UserError(f"{input_folder} is not laid out as DeepSpeed does: {type(error).__name__}: {error}") from error
    return made


def fingerprint(input_folder: Path, options: Options) -> str:
    """A digest of everything that the output depends on, with the mtimes of the checkpoint's files."""
    entries = ((os.path.abspath(entry.path), entry.stat()) for entry in os.scandir(input_folder))
    files = sorted((path, found.st_size, found.st_mtime_ns) for path, found in entries)
    own = {**asdict(options), "workers": None}
    return hashlib.sha256(json.dumps([__version__, files, own]).encode()).hexdigest()


def _finish(folder: UnfinishedFolder, planned: Plan, check: Callable[[Path], object]) -> None:
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
        folder.rename(folders)
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
        from ckpt_patches.fingerprint import contents, files
    except ModuleNotFoundError as error:
        warn(f"what was written was not compared with what the run has recorded: {error.name} is not installed")
        return
    checked = contents.of(files.opened(made), quiet=True).checked
    assert checked is not None, made  # it has the record
    warn(f"against the record of the run: {checked.sentence()}")
    if checked.differences and strict:
        lines = [f"  {one.parameter} {one.state}: {one.what}" for one in checked.differences[:MOST_SHOWN]]
        raise UserError(
            "\n".join(
                [
                    f"{source} is not what the run recorded when it saved, and was not converted:",
                    *lines,
                    "take another checkpoint; one that was repaired is converted as it is by "
                    "python -m deepspeed_patches.ds_to_universal --no_strict",
                ]
            )
        )
