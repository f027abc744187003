"""Convert a checkpoint: read its headers, plan, check, copy the bytes, and rename the result."""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from ckpt_patches import __version__
from ckpt_patches.convert import reading, source
from ckpt_patches.convert.conversion_plan import Output, Plan, plan
from ckpt_patches.convert.write import Writer, batches
from ckpt_patches.errors import UserError
from ckpt_patches.fingerprint import record_files
from ckpt_patches.runtime.distributed import Ranks
from ckpt_patches.runtime.progress import shown_in_order
from ckpt_patches.runtime.unfinished import UnfinishedFolder, check_outside

WORKERS = 8  # on two cores, too: while one waits for the disk, another works
WORTH_A_PROCESS = 64 << 20  # bytes; starting a process takes as long as copying these
COST_OF_A_FILE = 1 << 18  # bytes that can be moved in the time that it takes to create a file
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
        UserError: the checkpoint is damaged, of an unsupported kind or changes meanwhile, the output folder exists, the
            disk has too little room, or a rank is missing.
        OSError: a file cannot be read or written. Written files stay, and the same call continues from there.
    """
    begin = time.monotonic() if begin is None else begin
    path, options, ranks = Path(input_folder), options or Options(), ranks or Ranks()
    workers = options.workers
    made: list[tuple[Plan, UnfinishedFolder]] = []
    ranks.gather("planning", lambda: made.append(prepare(path, Path(output_folder), options)))
    planned, folder = made[0]
    outputs = {output.name: output for output in planned.outputs}
    with ExitStack() as stack:

        def start() -> tuple[str, list[str]]:
            for warning in planned.warnings:
                warn(warning)
            stack.enter_context(folder.held())
            left = folder.missing(sorted(outputs, key=lambda name: (-outputs[name].nbytes, name)))
            return str(folder.working), left

        where, missing = ranks.first("making the output folder", start)
        began = time.monotonic()

        def write() -> tuple[int, int]:
            own = [outputs[name] for name in ranks.share(missing) if name in outputs]
            if own and (where != str(folder.working) or not os.path.isdir(where)):
                raise UserError(
                    f"{folder.working}: expected the folder that rank 0 has made for the same checkpoint, found "
                    "another one or none: is it on this host as well, and have all ranks the same arguments?"
                )
            return _write(own, folder.working, workers)

        ranks.gather("checking the checksums", lambda: _check(ranks.share(planned.records if missing else ()), workers))
        written = ranks.gather("writing", write)

        def finish() -> None:
            if fingerprint(path, options) != folder.depends_on:  # else what was copied is what had right checksums
                raise UserError(f"{path} has changed while it was converted: run the same command again")
            _check_recorded(path, folder.working, options, warn)
            folder.finish(outputs, LATEST)

        ranks.first("finishing the output folder", finish)
    end, nbytes = time.monotonic(), sum(done for done, _ in written)
    return Summary(
        output_folder=str(folder.final),
        bytes=nbytes,
        files=len(missing),
        files_before=len(outputs) - len(missing),
        seconds=end - begin,
        plan_seconds=began - begin,
        rate=nbytes / max(end - began, 1e-9),
        workers=sum(count for _, count in written),
    )


def _check(records: Sequence[reading.Records], workers: int) -> None:
    """Check the checksums in files of the checkpoint.

    Raises:
        UserError: one is wrong.
    """
    nbytes = [sum(own.nbytes for own in stored) for _, stored in records]
    count = max(1, min(workers, len(os.sched_getaffinity(0)), sum(nbytes) // WORTH_A_PROCESS))
    for _ in shown_in_order(reading.check, records, nbytes, count, "checksums:"):
        pass


def _write(outputs: Sequence[Output], folder: Path, workers: int) -> tuple[int, int]:
    """Write files. Returns their bytes, and the number of worker processes.

    Raises:
        OSError: a file cannot be read or written.
        WorkerDefect: see `ckpt_patches.runtime.processes`.
    """
    cost = sum(output.nbytes + COST_OF_A_FILE for output in outputs)
    count = max(1, min(workers, len(outputs), cost // WORTH_A_PROCESS))
    together = [*batches(outputs)]
    nbytes = [sum(output.nbytes for output in batch) for batch in together]
    return sum(shown_in_order(Writer(folder), together, nbytes, count)), count


def prepare(input_folder: Path, output_folder: Path, options: Options) -> tuple[Plan, UnfinishedFolder]:
    """Plan, and check everything that can be checked before the first byte is written."""
    source.check_folder(input_folder)
    check_outside(input_folder, output_folder)
    folder = UnfinishedFolder(output_folder, "conversion", fingerprint(input_folder, options), input_folder)
    found = planned(input_folder, options)
    folder.check({output.name: output.nbytes for output in found.outputs})
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
    """Everything that the output depends on, with the mtimes of the checkpoint's files."""
    entries = ((os.path.abspath(entry.path), entry.stat()) for entry in os.scandir(input_folder))
    files = sorted((path, found.st_size, found.st_mtime_ns) for path, found in entries)
    own = {**asdict(options), "workers": None}
    return json.dumps([__version__, files, own])


def _check_recorded(source: Path, made: Path, options: Options, warn: Callable[[str], object]) -> None:
    """Compare what was written with the fingerprints that the run recorded at the save, if it did.

    Raises:
        UserError: with `strict`, a state differs from the record.
    """
    if record_files.of_deepspeed(source) is None:
        return
    try:
        from ckpt_patches.fingerprint import contents, files
    except ModuleNotFoundError as error:
        warn(f"what was written was not compared with what the run has recorded: {error.name} is not installed")
        return
    checked = contents.of(files.opened(made), quiet=True).checked
    assert checked is not None, made  # it has the record: the model states are copied
    warn(f"against the record of the run: {checked.sentence()}")
    differences = [one for one in checked.differences if one.state not in options.drop_state]
    if differences and options.strict:
        first, *others = differences
        more = f", and {len(others)} more (ckpt-patches fingerprint)" if others else ""
        raise UserError(
            f"{source} is not what the run recorded when it saved, and was not converted: {first.parameter} "
            f"{first.state}: {first.what}{more}; take another checkpoint; one that was repaired is converted as it is "
            "by python -m deepspeed_patches.ds_to_universal --no_strict"
        )
