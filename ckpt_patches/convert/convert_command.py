"""The command `ckpt-patches to-universal`, and the same with the options of upstream's converter."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ckpt_patches import Switches, tell
from ckpt_patches.convert.convert import WORKERS, Options, Summary, convert
from ckpt_patches.convert.source import UpstreamsAloneError, check_folder
from ckpt_patches.runtime import commands
from ckpt_patches.runtime.distributed import joined
from ckpt_patches.runtime.options import Parser, add_distributed, add_trust, add_workers, described, spelled
from ckpt_patches.runtime.ranks import is_rank_zero
from ckpt_patches.runtime.unfinished import check_parent
from ckpt_patches.runtime.units import in_bytes

DESCRIPTION = "Convert a DeepSpeed ZeRO checkpoint to a universal one, reading and writing every byte once."
EPILOG = (
    "exit status: 0 converted, or already; 1 a defect, with a traceback; 2 not converted: a line names the reason, and "
    "the same command continues from there; 130 interrupted"
)
HAND_OVER = "ds_to_universal"  # the program that has the options of upstream's converter
INTERRUPTED = "interrupted; the same command goes on from here"
FIX = "universal_converter"  # by which upstream's converter calls `take_over`
SCHEMA = 2  # of the JSON; increased when a key is renamed, removed or changes its meaning


def main(arguments: Sequence[str] | None = None, program: str = HAND_OVER) -> int:
    """Run the command and return its exit status."""
    begin = time.monotonic() - time.process_time()  # includes the imports
    made = parser(program)
    options = made.parse_args(spelled(sys.argv[1:] if arguments is None else arguments))
    if bool(options.path) == bool(options.input_folder):
        made.error("expected one folder of a checkpoint, PATH")
    work = partial(_run, options, program, begin)
    return commands.run(_prefix(program), work, interrupted=INTERRUPTED, defect=1)


def _prefix(program: str) -> str:
    """What messages begin with: as those of all commands, the program's name without that of the command."""
    return program.partition(" ")[0]


def take_over(upstream: Any, module: str) -> bool:
    """Convert in place of upstream's converter, whose `main` calls this; False if a switch leaves it to that one.

    So does a kind of checkpoint that only upstream converts.

    As that one's, this is the work of one process, whatever launcher has started it, and any class is accepted: here,
    without running its code.

    Args:
        upstream: the options, as upstream's converter parses them.
        module: the name of its module; as a program, it ends with one line and the command's status after an error.

    Raises:
        UserError, OSError: the checkpoint was not converted.
        SystemExit: the same, in a program.
    """
    switches = Switches(os.environ)
    if switches.mode == "off" or FIX in switches.skip:
        return False
    tell(f"ckpt-patches to-universal converts in place of DeepSpeed's converter, which CKPT_PATCHES_SKIP={FIX} runs")

    left_to_upstream = []

    def work() -> int:
        options = Options(
            upstream.num_extract_workers,
            getattr(upstream, "strict", True),
            getattr(upstream, "inject_missing_state", False),
            trust_checkpoint=True,
        )
        warn = partial(commands.say, HAND_OVER)
        try:
            print(text(convert(upstream.input_folder, upstream.output_folder, options, warn=warn)))
        except UpstreamsAloneError as error:
            left_to_upstream.append(error)
            warn(f"DeepSpeed's own converter runs: {error}")
        return 0

    if module != "__main__":
        work()
    elif status := commands.run(HAND_OVER, work, interrupted=INTERRUPTED, defect=1):
        sys.exit(status)
    return not left_to_upstream


def _run(options: argparse.Namespace, program: str, begin: float) -> int:
    say = partial(commands.say, _prefix(program))
    path = Path(options.path or options.input_folder)
    if program != HAND_OVER:
        check_parent(Path(options.output))
    with commands.told_as_json(SCHEMA, options.json and is_rank_zero(os.environ)):
        check_folder(path)  # before importing torch and waiting for other ranks
    chosen = Options(
        options.workers,
        options.strict,
        options.inject_missing_state,
        options.trust_checkpoint,
        tuple(options.drop_state),
    )
    with joined(options.distributed) as ranks:
        summary = convert(path, options.output, chosen, ranks=ranks, begin=begin, warn=say)
    if ranks.rank == 0:
        print(json.dumps({"schema": SCHEMA, **asdict(summary)}) if options.json else text(summary))
    return 0


def parser(program: str) -> argparse.ArgumentParser:
    """The command's parser."""
    command = program if " " in program else f"ckpt-patches {program}"
    command = "python -m deepspeed_patches.ds_to_universal" if program == HAND_OVER else command
    made = Parser(program, **described(DESCRIPTION, f"{command} global_step10 --output universal", after=EPILOG))
    made.add_argument("path", nargs="?", metavar="PATH", help="the folder of the ranks' files, such as global_step10")
    made.add_argument("--input-folder", metavar="PATH", help="the same, as DeepSpeed's converter names it")
    made.add_argument("--output", "--output-folder", required=True, metavar="NEW", help="the folder to create")
    made.add_argument(
        "--drop-state",
        action="append",
        default=[],
        metavar="NAME",
        help="leave out this state of the optimizer, which begins anew with it; can be repeated",
    )
    add_workers(made, "--num-extract-workers", default=WORKERS)
    add_trust(made)
    add_distributed(made)
    made.add_argument("--json", action="store_true", help="print JSON (ckpt-patches explain json)")
    made.set_defaults(strict=True, inject_missing_state=False)
    if program == HAND_OVER:
        _add_upstream(made)
    return made


def _add_upstream(parser: argparse.ArgumentParser) -> None:
    """Add the other options of upstream's converter. Each file is written once, so two of them have no meaning."""
    parser.add_argument("--num-merge-workers", help=argparse.SUPPRESS)
    parser.add_argument("--keep-temp-folder", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--no-strict",
        dest="strict",
        action="store_false",
        help="convert even if patterns match no parameter, or states differ from the recorded ones",
    )
    parser.add_argument(
        "--inject-missing-state",
        action="store_true",
        help="convert a checkpoint of several tensor-parallel ranks without universal_checkpoint_info",
    )


def text(summary: Summary) -> str:
    before = f" ({summary.files_before} were there already)" if summary.files_before else ""
    written = f"{in_bytes(summary.bytes)} in {summary.files} files{before}"
    times = f"{summary.seconds:.1f} s ({summary.plan_seconds:.1f} s of it planning), {in_bytes(summary.rate)}/s"
    load = f'"checkpoint": {{"load_universal": true}} and tag {Path(summary.output_folder).name}'
    judged = "values were copied and not judged: ckpt-patches audit does that"
    return f"{summary.output_folder}: {written}, {times}\n{judged}\nto load it: {load}"
