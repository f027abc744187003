"""The command `ckpt-patches resume-from`."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_patches.errors import UserError
from ckpt_patches.runtime import commands
from ckpt_patches.runtime.options import MANY, add_workers, described

if TYPE_CHECKING:
    from ckpt_patches.audit.resume_from import Answer, Save, Skipped

PROGRAM = "ckpt-patches"
SCHEMA = 1  # of the JSON; raised when a key changes its meaning or is removed
OF_UNIVERSAL = "latest_universal"  # the tracker that DeepSpeed reads with "load_universal"
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
    if not options.run_folder.is_dir():
        if options.allow_empty and not os.path.lexists(options.run_folder):
            commands.note(PROGRAM, f"{options.run_folder} is not there yet")
            if options.json:
                print(json.dumps(_json_without_a_run(options), indent=1))
            return 0
        from ckpt_patches.formats.reading import wrong_path

        raise wrong_path(options.run_folder, "the folder of a run")
    with commands.needed_by("resume-from"):
        from ckpt_patches.audit.resume_from import resume_from
    how = {"quick": options.quick, "most": options.most}
    answer = resume_from(
        options.run_folder, options.workers, **how, say=lambda own: commands.note(PROGRAM, skipped(own))
    )
    for line in lines(answer, quick=options.quick):
        (commands.note if answer.save else commands.say)(PROGRAM, line)
    if options.json:
        print(json.dumps(as_json(answer, quick=options.quick), indent=1))
    elif answer.save is not None:
        sys.stdout.flush()
        sys.stdout.buffer.write(os.fsencode(_printed(options, answer.save)) + b"\n")  # names can be of any bytes
        sys.stdout.buffer.flush()
    return 0 if answer.save or (options.allow_empty and answer.is_empty) else 1


def _json_without_a_run(options: argparse.Namespace) -> dict[str, Any]:
    from ckpt_patches.audit.resume_from import Answer

    return as_json(Answer(options.run_folder, None, None, (), 0, ()), quick=options.quick)


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


def skipped(save: "Skipped") -> str:
    """One line on a save that is not the answer."""
    verdict = f"{save.verdict}: " if save.verdict else ""
    return f"skipped {save.path}: {verdict}{save.reason}"


def lines(answer: "Answer", *, quick: bool) -> list[str]:
    """What to know about the answer; if there is none, the last line has the reason."""
    if answer.save is None:
        return _lines_of_none(answer, quick=quick)
    found = f"structure only, no element was read: {answer.save.path}"
    if not quick and answer.report:
        found = f"{answer.save.path}: {answer.report.verdict}"
    said = [f"{found}; {how}" if (how := _how(answer)) else found]
    here = os.path.realpath(answer.save.path)
    for tracker in answer.trackers:
        if (tracker.path.name == OF_UNIVERSAL) != answer.save.is_universal:
            continue  # the load does not read it
        if tracker.names is None or os.path.realpath(tracker.names) != here:
            named = tracker.names.name if tracker.names else "no checkpoint"
            said.append(f"{tracker.path.name} names {named}, not this one: a load without its name would take that")
    return said


def _lines_of_none(answer: "Answer", *, quick: bool) -> list[str]:
    said = ["structure only, no element was read"] if quick else []
    limit = f"; {answer.left} older ones were not read (--max)" if answer.left else ""
    if answer.unknown:
        return [*said, f"no checkpoint of a known format in {answer.run}, but {answer.unknown}"]
    if not answer.skipped:
        return [*said, f"no checkpoint in {answer.run}"]
    if answer.has_weights_alone:
        newest = answer.skipped[0].path
        those = "all that were read" if answer.left else "all"
        why = f"{those} have weights without an optimizer, with which a training starts anew"
        return [*said, f"no checkpoint in {answer.run} can be resumed from: {why}{limit}; the newest is {newest}"]
    if answer.undecided is None:
        all_of = ", all are damaged or incomplete" if all(own.verdict for own in answer.skipped) else ""
        return [*said, f"no checkpoint in {answer.run} is verified as good{all_of}{limit}"]
    path, _, reason = answer.undecided.path, answer.undecided.verdict, answer.undecided.reason
    what = "without damage in its structure" if quick else "without damage"
    return [
        *said,
        f"no checkpoint in {answer.run} is verified as good{limit}; the newest {what} is {path}, "
        f"which is {answer.undecided.verdict}: {reason}",
    ]


def _how(answer: "Answer") -> str:
    from ckpt_patches.audit.report.run_report import how_to_load

    save, report = answer.save, answer.report
    return how_to_load(save.path, report.checkpoint.format) if save and report else ""


def as_json(answer: "Answer", *, quick: bool) -> dict[str, Any]:
    """The keys of `resume-from --json`: docs/reference/json.md."""
    save, undecided = answer.save, answer.undecided
    return {
        "schema": SCHEMA,
        "run": str(answer.run),
        "structure_only": quick,
        "resume_from": save and str(save.path),
        "tag": save and save.name,
        "step": save and save.step,
        "undecided": undecided and str(undecided.path),
        "skipped": [
            {"path": str(own.path), "verdict": own.verdict or None, "reason": own.reason} for own in answer.skipped
        ],
        "left": answer.left,
        "trackers": [{"name": own.path.name, "names": own.names and str(own.names)} for own in answer.trackers],
    }
