"""The command `ckpt-patches resume-from`."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_patches.errors import UserError
from ckpt_patches.runtime import commands
from ckpt_patches.runtime.options import MANY, add_workers, described

if TYPE_CHECKING:
    from ckpt_patches.audit.resume_from import Save

PROGRAM = "ckpt-patches"
PATH, TAG, STEP = "path", "tag", "step"


def add_to(parsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Define the command's options. Imports happen when it runs."""
    command = parsers.add_parser(
        "resume-from",
        help="print the newest checkpoint of a run that is good",
        **described(
            "Print the newest checkpoint of a run that is WHOLE or REPAIRED. Checkpoints are read from the newest on, "
            "and reading ends at the first good one. Standard output has one line, the reasons are on standard error.",
            "ckpt-patches resume-from /checkpoints/run1",
            "ckpt-patches resume-from /checkpoints/run1 --quick",
            'path=$(ckpt-patches resume-from run1) && torchrun train.py "$path"',
            "ckpt-patches explain resume_from",
            after="exit status: 0 found, 1 no checkpoint is there, or none is verified as good, 2 wrong usage, or "
            "several runs in RUN",
        ),
    )
    command.add_argument(
        "run_folder",
        nargs="?",
        type=Path,
        default=Path(),
        metavar="RUN",
        help="the folder with the checkpoints of one run (default: the current folder)",
    )
    command.add_argument(
        "--format",
        choices=(PATH, TAG, STEP),
        default=PATH,
        help="what to print: its folder (default); the name of its folder, such as global_step10 for DeepSpeed; or "
        "the step in that name, such as 10 for Megatron-LM's --ckpt-step",
    )
    command.add_argument(
        "--quick",
        action="store_true",
        help="look at structure alone (files, sizes, indexes, steps), in seconds: damaged elements are not found",
    )
    command.add_argument(
        "--max", dest="most", type=_number, metavar="N", help="judge the newest N checkpoints at most (default: all)"
    )
    command.add_argument(
        "--allow-empty",
        action="store_true",
        help="exit with 0 and print nothing if RUN does not exist or has no checkpoint yet, as before a first start",
    )
    command.add_argument("--json", action="store_true", help="print JSON (ckpt-patches explain json)")
    add_workers(command, many=MANY)
    command.set_defaults(run=run)


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a number of checkpoints, found {text!r}")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from ckpt_patches.audit.resume_from import Answer, resume_from
    from ckpt_patches.formats.reading import wrong_path

    run, quick = options.run_folder, options.quick
    if run.is_dir():
        how = {"quick": quick, "most": options.most}
        answer = resume_from(run, options.workers, **how, say=lambda own: commands.note(PROGRAM, str(own)))
        for line in answer.lines():
            (commands.note if answer.save else commands.say)(PROGRAM, line)
    elif options.allow_empty and not os.path.lexists(run):
        answer = Answer(run, quick)
        commands.note(PROGRAM, f"{run} is not there yet")
    else:
        raise wrong_path(run, "the folder of a run")
    if options.json:
        print(json.dumps(answer.as_json(), indent=1))
    elif answer.save is not None:
        sys.stdout.flush()
        sys.stdout.buffer.write(os.fsencode(_printed(options, answer.save)) + b"\n")  # names can be of any bytes
        sys.stdout.buffer.flush()
    return 0 if answer.save or (options.allow_empty and answer.is_empty) else 1


def _printed(options: argparse.Namespace, save: "Save") -> str:
    if options.format == PATH:
        return str(save.path)
    if options.run_folder not in (save.path, save.path.parent):
        raise UserError(
            f"{options.run_folder}: expected a run's own folder for --format {options.format}, found the run in "
            f"{save.path.parent}; name that"
        )
    if options.format == TAG:
        return save.name
    if save.step is None:
        raise UserError(f"{save.path}: expected a step in its name for --format {STEP}, found none")
    return str(save.step)
