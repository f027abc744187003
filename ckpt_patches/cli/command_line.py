"""The command `ckpt-patches`: the table of its commands, and the parser. Each command is a function in a module beside
this one, or in the room of its tool."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_patches import __version__
from ckpt_patches.audit import audit_command as audit
from ckpt_patches.audit import resume_command as resume_from
from ckpt_patches.cli import explain, fix_commands
from ckpt_patches.cli import fingerprint_command as fingerprint
from ckpt_patches.engine.releases import distribution
from ckpt_patches.migrate import migrate_command as migrate
from ckpt_patches.runtime import commands as runtime_commands
from ckpt_patches.runtime import terminal
from ckpt_patches.runtime.options import Parser, described, spelled

# The commands in --help, by what they are for.
GROUPS = {
    "fixes": ("status", "list", "explain"),
    "checkpoints": ("resume-from", "audit", "repair", "to-universal", "migrate", "compare", "fingerprint"),
    "write the fixes": ("diff", "apply", "revert"),
}
AFTER = """options of every command:
  -q, --quiet           no progress and no remarks: results and errors alone
  -v, --verbose         print a traceback before the line of an error
  --color WHEN          auto (default), always or never

environment variables:
  CKPT_PATCHES          warn (default), strict (a missing fix is an error), off
  CKPT_PATCHES_SKIP     fixes that are switched off, such as FIX,OTHER
  CKPT_PATCHES_FINGERPRINT
                        1: record the state at a save and verify it at a load
  NO_COLOR              no colors

Each command has its own --help. ckpt-patches explain lists all pages.

exit status: 0 success, or nothing to do; 1 a needed fix is missing, or a
checkpoint is damaged; 2 wrong usage, or a file that cannot be read or written;
3 no verdict on a checkpoint is possible"""

TO_UNIVERSAL = "to-universal"
ALIASES = {"check": "audit", "ds-to-universal": TO_UNIVERSAL}


Option = tuple[str, dict[str, Any]]  # an argument of a command, as argparse takes it


def _option(name: str, text: str, **how: Any) -> Option:
    return name, {"help": text, **how}


class Command(NamedTuple):
    """A command on fixes and pages. Those on checkpoints are defined in the rooms of their tools."""

    name: str
    run: Callable[[argparse.Namespace], int]
    help: str  # in the list of commands
    text: str  # in its own help
    examples: tuple[str, ...]
    after: str  # the end of its help
    options: tuple[Option, ...]


MATCH_STATUS = "exit status: 0 success, 1 a fix does not match, 2 wrong usage or an unreadable file"
JSON = _option("--json", "print JSON (ckpt-patches explain json)", action="store_true")
FIXES = _option("fixes", "names from `ckpt-patches list` (default: all)", nargs="*", metavar="FIX")
TREE = _option(
    "--tree", "a checkout, site-packages or --target folder (default: what this Python imports)", metavar="PATH"
)

COMMANDS = (
    Command(
        "status",
        fix_commands.run_status,
        "show what is installed, and the state of every fix",
        "Show the installed packages and the state of every fix: active, in place, not needed, NO MATCH, off or "
        "replaced.",
        ("ckpt-patches status --require megatron-core",),
        "exit status: 0 success, 1 a needed fix or a required package is missing, or nothing to patch is installed",
        (
            JSON,
            TREE,
            _option(
                "--require",
                "exit with 1 if this package, such as megatron-core, is not installed; repeatable",
                action="append",
                default=[],
                type=distribution,
                metavar="PACKAGE",
            ),
        ),
    ),
    Command(
        "list",
        fix_commands.run_list,
        "list the bugs by symptom, with their releases and fixes",
        "List the bugs of the installed packages that have a fix: symptom, affected releases, affected stacks and the "
        "fix.",
        ("ckpt-patches list --for megatron-core==0.16.1", "ckpt-patches list --all"),
        "",
        (
            JSON,
            _option(
                "--for",
                "only the bugs of a tested release (default: the installed one)",
                dest="release",
                metavar="PACKAGE[==VERSION]",
            ),
            _option("--all", "the bugs of all packages and releases", action="store_true"),
            _option("--tree", "only the bugs whose fixes apply to a checkout or a folder of packages", metavar="PATH"),
        ),
    ),
    Command(
        "explain",
        explain.run,
        "find the page for an error, a log, a question; print a page",
        "Print the page of a fix or of a topic. With an error text, the file of a log, an effect, a question or the "
        "name of a finding: list the pages that answer it, at most five, best first. Without an argument: list all "
        "pages.",
        (
            "ckpt-patches explain dp_zero_empty_state",
            "ckpt-patches explain \"KeyError: 'exp_avg'\"",
            "ckpt-patches explain train.log",
            "ckpt-patches explain loss jumps after resume",
            "ckpt-patches explain lost_moment",
        ),
        "exit status: 0 success, 1 no page answers the text, 2 a log cannot be read",
        (
            _option(
                "text", "a page's name, a text, or a file; - is standard input", nargs="*", metavar="NAME | TEXT | LOG"
            ),
            JSON,
        ),
    ),
    Command(
        "diff",
        fix_commands.run_diff,
        "print the fixes as a unified diff",
        "Print fixes as one unified diff for `git apply`, or write a numbered series for `git am` (--split).",
        (
            "ckpt-patches diff numpy2_product --tree ~/Megatron-LM --with-test > fix.patch",
            "ckpt-patches diff --split patches --tree ~/Megatron-LM",
        ),
        MATCH_STATUS,
        (
            FIXES,
            _option("--with-test", "add each fix's upstream-style regression test", action="store_true"),
            _option(
                "--split",
                "write each fix, with its test, into a file in DIR, as `git format-patch` does",
                type=Path,
                metavar="DIR",
            ),
            TREE,
        ),
    ),
    Command(
        "apply",
        fix_commands.run_apply,
        "write the fixes into the installed files",
        "Write fixes into the installed files. Idempotent, and atomic for each package.",
        ("ckpt-patches apply",),
        MATCH_STATUS,
        (FIXES, JSON, TREE),
    ),
    Command(
        "revert",
        fix_commands.run_revert,
        "remove applied fixes from the installed files",
        "Restore the installed files byte for byte. A file that changed since is refused.",
        ("ckpt-patches revert numpy2_product",),
        "exit status: 0 success, 2 wrong usage, or a file that was refused or cannot be read or written",
        (FIXES, JSON, TREE),
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return runtime_commands.run("ckpt-patches", lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: Sequence[str]) -> int:
    arguments = terminal.take_options(arguments)
    if arguments[:1] in (["help"], ["version"]):
        arguments = [*arguments[1:], f"--{arguments[0]}"]
    if arguments[:1] and arguments[0] in ALIASES:
        arguments = [ALIASES[arguments[0]], *arguments[1:]]
    if arguments[:1] == [TO_UNIVERSAL]:
        from ckpt_patches.convert import convert_command

        return convert_command.main(arguments[1:], program=f"ckpt-patches {TO_UNIVERSAL}")
    options = parsers()[0].parse_args(spelled(arguments))
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


def parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The main parser, and the parser of each command."""
    parser: argparse.ArgumentParser = Parser(
        "ckpt-patches",
        usage="ckpt-patches [-h] [-V] COMMAND ...",
        **described(
            "Checkpoint fixes for megatron-core, DeepSpeed, NVRx, apex and torch, and tools for checkpoints.",
            "ckpt-patches status",
            "ckpt-patches list --for megatron-core==0.16.1",
            "ckpt-patches audit /checkpoints/run1",
            after=AFTER,
        ),
    )
    parser.add_argument("-V", "--version", action="version", version=f"training-checkpoint-patches {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", prog="ckpt-patches", help=argparse.SUPPRESS)
    for name, run, summary, text, examples, after, options in COMMANDS:
        command = commands.add_parser(name, help=summary, **described(text, *examples, after=after))
        for option, how in options:
            command.add_argument(option, **how)
        command.set_defaults(run=run)
    # Its options are defined in its own module, which the other commands do not import.
    commands.add_parser(TO_UNIVERSAL, help="convert a DeepSpeed ZeRO checkpoint to a universal one", add_help=False)
    for room in (audit, resume_from, migrate, fingerprint):
        room.add_to(commands)
    helps = {action.dest: action.help for action in commands._get_subactions()}
    groups = ("\n".join([f"{title}:", *(f"  {n:13} {helps[n]}" for n in names)]) for title, names in GROUPS.items())
    parser.epilog = "\n\n".join([*groups, str(parser.epilog)])
    return parser, commands.choices
