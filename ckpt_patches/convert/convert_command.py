"""The command `ckpt-patches to-universal`: upstream's options, and some more."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from ckpt_patches.convert.convert import BYTES_IN_FLIGHT, WORKERS, Options, Summary, convert
from ckpt_patches.convert.new_file import LOCAL
from ckpt_patches.formats.zero_checkpoint import check_folder
from ckpt_patches.runtime import commands
from ckpt_patches.runtime.distributed import joined
from ckpt_patches.runtime.options import (
    Parser,
    add_distributed,
    add_no_sync,
    add_trust,
    add_workers,
    described,
    spelled,
)
from ckpt_patches.runtime.units import in_bytes

DESCRIPTION = "Convert a DeepSpeed ZeRO checkpoint to a universal one, reading and writing every byte once."
EPILOG = (
    "exit status: 0 converted; 1 a defect, with a traceback to report; 2 not converted: a line names the reason, and "
    "the same command continues from there; 130 interrupted"
)
# Options that are ignored, and why.
OBSOLETE = {
    "num_merge_workers": "nothing is merged: each file is written once, by --workers processes",
    "keep_temp_folder": "there is no temporary folder",
    "access": "files are read by ranges",
}
SCHEMA = 1  # of the JSON; increased when a key is renamed, removed or changes its meaning
UNITS = {"k": 10, "m": 20, "g": 30}


def main(arguments: Sequence[str] | None = None, program: str = "ds_to_universal") -> int:
    """Run the command and return its exit status."""
    begin = time.monotonic() - time.process_time()  # includes the imports
    options = parser(program).parse_args(spelled(sys.argv[1:] if arguments is None else arguments))
    interrupted = "interrupted; the same command goes on from here"
    return commands.run(program, lambda: _run(options, program, begin), interrupted=interrupted, defect=1)


def _run(options: argparse.Namespace, program: str, begin: float) -> int:
    say = partial(commands.say, program)
    for name, reason in OBSOLETE.items():
        if getattr(options, name):
            say(f"--{name.replace('_', '-')} has no meaning any more: {reason}")
    folders = options.input_folder, options.output_folder
    check_folder(Path(folders[0]))  # before importing torch and waiting for other ranks
    with joined(options.distributed, say) as ranks:
        summary = convert(*folders, commands.chosen(Options, options), ranks=ranks, begin=begin, warn=say)
    if ranks.rank == 0:
        print(json.dumps({"schema": SCHEMA, **asdict(summary)}) if options.json else text(summary))
    return 0


def parser(program: str) -> argparse.ArgumentParser:
    """The command's parser."""
    command = program if " " in program else "python -m deepspeed_patches.ds_to_universal"
    example = f"{command} --input-folder step10 --output-folder universal"
    made = Parser(program, **described(DESCRIPTION, example, after=EPILOG))
    _add_arguments(made)
    return made


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input-folder", required=True, metavar="FOLDER", help="the ranks' files, such as global_step10"
    )
    parser.add_argument("--output-folder", required=True, metavar="FOLDER", help="the folder to create")
    add_workers(parser, "--num-extract-workers", default=WORKERS)
    parser.add_argument(
        "--num-merge-workers", type=int, metavar="N", help="ignored: an option of DeepSpeed's converter"
    )
    parser.add_argument("--keep-temp-folder", action="store_true", help="ignored: an option of DeepSpeed's converter")
    parser.add_argument("--access", choices=("read", "mmap"), help=argparse.SUPPRESS)
    parser.add_argument(
        "--no-strict",
        dest="strict",
        action="store_false",
        help="convert even if patterns match no parameter, fragments are not consecutive, or states differ from the "
        "recorded ones",
    )
    parser.add_argument(
        "--inject-missing-state",
        action="store_true",
        help="convert a checkpoint of several tensor-parallel ranks without universal_checkpoint_info",
    )
    add_trust(parser)
    parser.add_argument(
        "--bytes-in-flight",
        type=size,
        default=BYTES_IN_FLIGHT,
        metavar="BYTES",
        help="bytes in flight, all workers together (default: 16M, 16 MiB)",
    )
    parser.add_argument(
        "--direct",
        choices=("auto", "on", "off"),
        default="auto",
        help=f"write past the page cache (auto: on {' and '.join(LOCAL)}, unless --no-sync)",
    )
    add_no_sync(parser)
    add_distributed(parser)
    parser.add_argument("--json", action="store_true", help="print JSON (ckpt-patches explain json)")


def size(text: str) -> int:
    """Parse a number of bytes such as '16M'."""
    number, unit = (text[:-1], text[-1].lower()) if text[-1:].isalpha() else (text, "")
    if not number.isdigit() or unit not in ("", *UNITS) or int(number) == 0:
        raise argparse.ArgumentTypeError(f"expected bytes, like 16777216 or 16M, found {text!r}")
    return int(number) << UNITS.get(unit, 0)


def text(summary: Summary) -> str:
    before = f" ({summary.files_before} were there already)" if summary.files_before else ""
    written = f"{in_bytes(summary.bytes)} in {summary.files} files{before}"
    times = f"{summary.seconds:.1f} s ({summary.plan_seconds:.1f} s of it planning), {in_bytes(summary.rate)}/s"
    return f"{summary.output_folder}: {written}, {times}"
