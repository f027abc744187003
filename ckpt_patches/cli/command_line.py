"""The command `ckpt-patches`: status, diff, apply, revert, and the tools."""

import argparse
import io
import json
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_patches import Switches, __version__
from ckpt_patches.audit import audit_command as audit
from ckpt_patches.audit import resume_command as resume_from
from ckpt_patches.cli import completion
from ckpt_patches.cli import fingerprint_command as fingerprint
from ckpt_patches.engine.fix import every_fix, load
from ckpt_patches.engine.installed import DISTRIBUTIONS
from ckpt_patches.engine.plan import FixResult, Outcome, TreePlan, fixes_for, module_path, plan_tree
from ckpt_patches.engine.registry import PACKAGES, package_with
from ckpt_patches.engine.releases import distribution, recorded_release
from ckpt_patches.engine.trees import Selection, root_of, select
from ckpt_patches.errors import UserError, unknown
from ckpt_patches.migrate import migrate_command as migrate
from ckpt_patches.runtime import commands as runtime_commands
from ckpt_patches.runtime import terminal
from ckpt_patches.runtime.options import Parser, described, spelled

if TYPE_CHECKING:
    from ckpt_patches.cli.status import Installed, Status
    from ckpt_patches.engine.fix import Fix
    from ckpt_patches.engine.fix_table import Row

# The commands in --help, by what they are for; the others are not listed.
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
# Commands and options of earlier versions, and what to use instead.
ALIASES = {"check": "audit", "ds-to-universal": TO_UNIVERSAL}
REMOVED_OPTIONS = {
    "show": "removed in 0.3; ckpt-patches diff --module MODULE prints what the fixes change in a module",
    "--break-lock": "removed in 0.3; a lock ends with the process that holds it",
    "--no-sync": "removed in 0.3; every file is on disk before it gets its name",
    "--step": "removed in 0.3; all param groups of a checkpoint must be at one step, or megatron-core refuses it",
    "--prove": "removed in 0.3; make prove SITE=/path/to/site-packages, in a clone of the repository, runs the proofs",
    "--plot": "removed in 0.3; --html FILE.html writes a page with the range of each finding",
}
COLUMNS = 80  # of a list in a pipe
# Version of the JSON of status and list; increased when a key is renamed, removed or changes its meaning.
SCHEMA = 2
JSON_HELP = "print JSON (ckpt-patches explain json)"
MATCH_STATUS = "exit status: 0 success, 1 a fix does not match, 2 wrong usage or an unreadable file"

Outcomes = dict[str, tuple[str, str]]  # of apply and revert, by fix: the outcome and its reason
SKIPPED = "not applied (CKPT_PATCHES_SKIP)"
MEANING = {
    Outcome.APPLIES: "applied",
    Outcome.NOT_NEEDED: "not needed",
    Outcome.NO_MATCH: "NO MATCH",
}


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
    arguments = spelled(arguments)
    _refuse_removed(arguments)
    options = _parsers()[0].parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


def _refuse_removed(arguments: Sequence[str]) -> None:
    """Raise UserError for a command or an option of an earlier version."""
    options = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    for name in (*arguments[:1], *options):
        if name in REMOVED_OPTIONS:
            raise UserError(f"{name}: {REMOVED_OPTIONS[name]}")


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
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
    _add_reports(commands)
    _add_patches(commands)
    # Its options are defined in its own module, which the other commands do not import.
    commands.add_parser(TO_UNIVERSAL, help="convert a DeepSpeed ZeRO checkpoint to a universal one", add_help=False)
    audit.add_to(commands)
    resume_from.add_to(commands)
    migrate.add_to(commands)
    fingerprint.add_to(commands)
    _add_others(commands)
    parser.epilog = f"{_listed_commands(commands)}\n\n{parser.epilog}"
    return parser, commands.choices


def _listed_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> str:
    helps = {action.dest: action.help for action in commands._get_subactions()}
    groups = ([f"{title}:", *(f"  {name:13} {helps[name]}" for name in names)] for title, names in GROUPS.items())
    return "\n\n".join("\n".join(lines) for lines in groups)


def _add_reports(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    status = commands.add_parser(
        "status",
        help="show what is installed, and the state of every fix",
        **described(
            "Show the installed packages and the state of every fix: active, in place, not needed, NO MATCH, off or "
            "replaced.",
            "ckpt-patches status --require megatron-core",
            after="exit status: 0 success, 1 a needed fix or a required package is missing, or nothing to patch is "
            "installed",
        ),
    )
    status.add_argument("--json", action="store_true", help=JSON_HELP)
    status.add_argument(
        "--tree",
        metavar="PATH",
        help="the checkout or --target folder that training scripts import (default: what this command imports)",
    )
    status.add_argument(
        "--require",
        action="append",
        default=[],
        type=distribution,
        metavar="PACKAGE",
        help="exit with 1 if this package, such as megatron-core, is not installed; repeatable",
    )
    status.set_defaults(run=_status)
    listed = commands.add_parser(
        "list",
        help="list the bugs by symptom, with their releases and fixes",
        **described(
            "List the bugs of the installed packages that have a fix: symptom, affected releases, affected stacks and "
            "the fix.",
            "ckpt-patches list --for megatron-core==0.16.1",
            "ckpt-patches list --all",
        ),
    )
    listed.add_argument("--json", action="store_true", help=JSON_HELP)
    which = listed.add_mutually_exclusive_group()
    which.add_argument(
        "--for",
        dest="release",
        metavar="PACKAGE[==VERSION]",
        help="only the bugs of a tested release (default: the installed one)",
    )
    which.add_argument("--all", action="store_true", help="the bugs of all packages and releases")
    which.add_argument(
        "--tree", metavar="PATH", help="only the bugs whose fixes apply to a checkout or a folder of packages"
    )
    listed.set_defaults(run=_list)
    explained = commands.add_parser(
        "explain",
        help="find the page for an error, a log, a question; print a page",
        **described(
            "Print the page of a fix or of a topic. With an error text, the file of a log, an effect, a question or "
            "the name of a finding: list the pages that answer it, at most five, best first. Without an argument: list "
            "all pages.",
            "ckpt-patches explain dp_zero_empty_state",
            "ckpt-patches explain \"KeyError: 'exp_avg'\"",
            "ckpt-patches explain train.log",
            "ckpt-patches explain loss jumps after resume",
            "ckpt-patches explain lost_moment",
            after="exit status: 0 success, 1 no page answers the text, 2 a log cannot be read",
        ),
    )
    explained.add_argument(
        "text", nargs="*", metavar="NAME | TEXT | LOG", help="a page's name, a text, or a file; - is standard input"
    )
    explained.add_argument("--json", action="store_true", help=JSON_HELP)
    explained.set_defaults(run=_explain)


def _add_patches(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    diff = commands.add_parser(
        "diff",
        help="print the fixes as a unified diff",
        **described(
            "Print fixes as one unified diff for `git apply`, or write a numbered series for `git am` (--split), or "
            "print what the hook changes in one module (--module).",
            "ckpt-patches diff numpy2_product --tree ~/Megatron-LM --with-test > fix.patch",
            "ckpt-patches diff --split patches --tree ~/Megatron-LM",
            "ckpt-patches diff --module megatron.core.optimizer.distrib_optimizer",
            after="\n  ".join(["modules:", *_edited_modules()]) + f"\n\n{MATCH_STATUS}",
        ),
    )
    diff.add_argument("--with-test", action="store_true", help="add each fix's upstream-style regression test")
    form = diff.add_mutually_exclusive_group()
    form.add_argument(
        "--split",
        type=Path,
        metavar="DIR",
        help="write each fix, with its test, into a file in DIR, as `git format-patch` does",
    )
    form.add_argument(
        "--module",
        metavar="MODULE",
        help="only the changes of this module as the hook runs it, without fixes that are switched off",
    )
    diff.set_defaults(run=_diff)
    apply = commands.add_parser(
        "apply",
        help="write the fixes into the installed files",
        **described(
            "Write fixes into the installed files. Idempotent, and atomic for each package.",
            "ckpt-patches apply",
            after=MATCH_STATUS,
        ),
    )
    apply.set_defaults(run=_apply)
    revert = commands.add_parser(
        "revert",
        help="remove applied fixes from the installed files",
        **described(
            "Restore the installed files byte for byte. A file that changed since is refused.",
            "ckpt-patches revert numpy2_product",
            after="exit status: 0 success, 2 wrong usage, or a file that was refused or cannot be read or written",
        ),
    )
    revert.set_defaults(run=_revert)
    for command in (diff, apply, revert):
        command.add_argument("fixes", nargs="*", metavar="FIX", help="names from `ckpt-patches list` (default: all)")
    for command in (apply, revert):
        command.add_argument("--json", action="store_true", help=JSON_HELP)
    for command in (diff, apply, revert):
        command.add_argument(
            "--tree",
            metavar="PATH",
            help="a checkout, site-packages or --target folder (default: what this Python imports)",
        )


def _add_others(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    completed = commands.add_parser(
        "completion",
        help="print a completion script for a shell",
        **described(
            "Print a shell script that completes commands, options and names of fixes.",
            "source <(ckpt-patches completion bash)",
        ),
    )
    completed.add_argument("shell", choices=completion.SHELLS)
    completed.set_defaults(run=_completion)


def _standard_input() -> str:
    """A text on standard input. Raises UserError if that is closed."""
    if sys.stdin is None:
        raise UserError("expected a text on standard input, found it closed")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    return sys.stdin.read()


def _explain(options: argparse.Namespace) -> int:
    from ckpt_patches.cli import explain

    text = " ".join(options.text)
    name = explain.name_of(text)
    if not options.json and (not text or name):
        print(explain.text(name).rstrip() if name else explain.overview())
        return 0
    if text == "-":
        text = _standard_input()
    elif not name and os.path.isfile(text):
        text = explain.end_of_log(Path(text))
    found = explain.answers(text)
    print(json.dumps(explain.as_json(found), indent=1) if options.json else explain.as_text(found))
    return 0


def _completion(options: argparse.Namespace) -> int:
    from ckpt_patches.cli import explain
    from ckpt_patches.convert import convert_command

    parsers = {**_parsers()[1], TO_UNIVERSAL: convert_command.parser(TO_UNIVERSAL)}
    words = {
        **dict.fromkeys(("apply", "revert"), tuple(every_fix())),
        "diff": [*every_fix(), *_edited_modules()],
        "explain": explain.names(),
        "completion": completion.SHELLS,
    }
    print(completion.script(parsers, words, options.shell), end="")
    return 0


def _status(options: argparse.Namespace) -> int:
    from ckpt_patches.cli import status

    found = status.collect(options.tree, options.require)
    if options.json:
        fixes = [{**asdict(fix), "package": DISTRIBUTIONS[fix.package]} for fix in found.fixes]
        print(json.dumps({"schema": SCHEMA, **asdict(found), "fixes": fixes, "complete": found.complete}, indent=1))
    else:
        _print_status(found)
    return 0 if found.complete else 1


def _list(options: argparse.Namespace) -> int:
    from ckpt_patches.engine import fix_table

    names, unmatched = _listed(options)
    fixes = [load(name) for name in names]
    if options.json:
        print(json.dumps({"schema": SCHEMA, "fixes": [_as_json(fix) for fix in fixes]}, indent=1))
    else:
        for title, rows in fix_table.groups(fixes):
            print("\n".join([terminal.paint(title, "bold"), *map(_entry, rows)]), end="\n\n")
        if not fixes:
            print("no fix applies")
    return _tell(unmatched)


def _entry(row: "Row") -> str:
    """A fix with its releases, and the symptom below it; wrapped, in a pipe as well."""
    symptom, releases, stacks, name = row
    first = f"{name}: {releases}; {stacks}" if stacks else f"{name}: {releases}"
    fill = partial(textwrap.fill, width=terminal.width() or COLUMNS, break_on_hyphens=False, subsequent_indent="    ")
    return f"{fill(first)}\n{fill(symptom, initial_indent='  ')}"


def _listed(options: argparse.Namespace) -> tuple[list[str], list[FixResult]]:
    """The fixes to list, and for a tree the results of those that do not match it."""
    if options.release:
        package, version = recorded_release(options.release)
        fixes = {name: load(name) for name in fixes_for(package)}
        return [name for name, fix in fixes.items() if fix.affects(version) and not fix.is_for_upstream_alone], []
    if options.all:
        return list(every_fix()), []
    if options.tree is None and not any(root_of(package, None) for package in PACKAGES):
        known = ", ".join(DISTRIBUTIONS[package] for package in PACKAGES)
        raise UserError(f"expected one of {known} to be installed, found none; ckpt-patches list --all has all bugs")
    plans = [plan_tree(s.root, s.package, s.names) for s in select([], options.tree)]
    for plan in plans:
        plan.check_readable()
    unmatched = [result for plan in plans for result in plan.results if result.outcome is Outcome.NO_MATCH]
    applied = _in_place(plans)
    present = [result for plan in plans for result in plan.results if result.name in applied or _applies(result)]
    return [result.name for result in present], unmatched


def _applies(result: FixResult) -> bool:
    return result.outcome is Outcome.APPLIES


def _in_place(plans: "Iterable[TreePlan | Selection]") -> set[str]:
    """The fixes that the files of these trees have already."""
    from ckpt_patches.inplace import rewrite

    return {name for plan in plans for name in rewrite.in_place(plan.root, plan.package).fixes}


def _as_json(fix: "Fix") -> dict[str, object]:
    from ckpt_patches.engine.fix import sentence

    return {
        "name": fix.name,
        "does": sentence(fix.name),
        "package": DISTRIBUTIONS[fix.package],
        "symptom": fix.symptom,
        "releases": fix.releases,
        "stacks": fix.stacks,
        "silent": fix.silent,
        "upstream": fix.upstream,
    }


def _print_status(found: "Status") -> None:
    from ckpt_patches.cli.status import python

    print(f"training-checkpoint-patches {found.version}, mode {found.mode}, {python()}")
    print(f"import hook: {'active' if found.hook_active else f'NOT ACTIVE: {found.hook_reason}'}\n")
    print("\n".join(terminal.table([_row(package) for package in found.installed])))
    for package in found.installed:
        _print_fixes(found, package)
    if found.async_saves:
        print(f"\nasynchronous saves: {found.async_saves}")
    for warning in found.warnings:
        print(f"\nwarning: {warning}")
    for error in found.errors:
        print(f"\nerror: {error}")
    print(f"\n{found.summary()}")


def _row(package: "Installed") -> tuple[str, ...]:
    why = f"({package.why})" if package.why else ""
    return package.name, package.version or "not installed", f"{package.location or ''} {why}".strip()


def _print_fixes(found: "Status", package: "Installed") -> None:
    """Print the fixes of an installed package, problems first."""
    from ckpt_patches.cli.status import ACTIVE, IN_PLACE, MISSING, NOT_NEEDED

    rank = {state: at for at, state in enumerate((*MISSING, ACTIVE, IN_PLACE, NOT_NEEDED))}
    own = [fix for fix in found.fixes if DISTRIBUTIONS[fix.package] == package.name]
    if not package.version or not own:
        return
    rows = [(fix.name, fix.state, fix.reason) for fix in sorted(own, key=lambda fix: (rank[fix.state], fix.name))]
    colors = {**dict.fromkeys(MISSING, "red"), ACTIVE: "green", IN_PLACE: "green"}
    print("\n" + terminal.paint(f"{package.name} {package.version}", "bold"))
    print("\n".join(terminal.table(rows, terminal.width(), wrapped=(2,), colors=colors)))


def _diff(options: argparse.Namespace) -> int:
    from ckpt_patches.engine.diffs import tree_diff

    if options.split is not None:
        return _split(options)
    if options.module is not None:
        return _diff_of_module(options)
    plans = [plan_tree(s.root, s.package, s.names, for_upstream=True) for s in select(options.fixes, options.tree)]
    for plan in plans:
        plan.check_readable()
    for plan in plans:
        sys.stdout.buffer.write(tree_diff(plan, with_test=options.with_test))
    _print_missing_dependencies(plans)
    return _tell([r for plan in plans for r in plan.results if not _applies(r)], _in_place(plans))


def _print_missing_dependencies(plans: Sequence[TreePlan]) -> None:
    """Report on stderr each dependency of the diff's fixes that applies here but is not in the diff."""

    for plan in plans:
        there = {result.name for result in plan.results}
        for name in plan.named(Outcome.APPLIES):
            needs = [other for other in load(name).depends_on if other not in there]
            if missing := plan_tree(plan.root, plan.package, needs, for_upstream=True).named(Outcome.APPLIES):
                print(f"{name}: depends on {', '.join(missing)}, not in this diff; name it as well", file=sys.stderr)


def _split(options: argparse.Namespace) -> int:
    """Write a numbered series for `git am`; for several packages, one series each."""
    from ckpt_patches.engine.format_patch import author_of, files_of
    from ckpt_patches.engine.series import plan_series

    selected = select(options.fixes, options.tree)
    results: list[FixResult] = []
    for tree in selected:
        series = plan_series(tree.root, tree.package, tree.names)
        for result in series.results:
            if result.unreadable:
                raise UserError(result.reason)
        results += series.results
        folder = options.split if len(selected) == 1 else options.split / DISTRIBUTIONS[tree.package]
        if series.patches:
            _write_patches(folder, files_of(series, author_of(tree.root)))
    return _tell([result for result in results if not _applies(result)], _in_place(selected))


def _write_patches(folder: Path, files: dict[str, bytes]) -> None:
    """Write a series into a folder. `git am DIR/*.patch` takes every patch there, so it may hold no other."""
    from ckpt_patches.runtime.durable import make_folder, replace_durably

    if folder.exists() and not folder.is_dir():
        raise UserError(f"expected a folder for the patches, found a file: {folder}")
    if others := sorted({path.name for path in folder.glob("*.patch")} - files.keys()):
        raise UserError(f"expected no patches of another series in {folder}, found {others[0]}; remove it")
    make_folder(folder)
    for name, data in files.items():
        replace_durably(folder / name, data)
        print(folder / name)


def _diff_of_module(options: argparse.Namespace) -> int:
    """Print what the hook changes in a module, with all fixes that are not switched off."""
    from ckpt_patches.engine.diffs import file_diff

    if options.fixes or options.with_test:
        raise UserError("expected --module alone, found names of fixes or --with-test beside it")
    edited = _edited_modules()
    if options.module not in edited:
        raise UserError(unknown("fix edits the module", options.module, edited, "ckpt-patches diff --help"))
    package = package_with(options.module)
    (tree,) = select([name for name, fix in every_fix().items() if options.module in fix.modules], options.tree)
    switches = Switches(os.environ)
    plan = plan_tree(tree.root, package, fixes_for(package, switches.skip, switches.overlays))
    plan.check_readable()
    file = plan.files.get(options.module)
    path = Path(module_path(tree.root, options.module))
    if file is None and not path.exists():
        raise UserError(f"expected {path}, found no such file: this release does not have the module")
    if file is not None:
        sys.stdout.buffer.write(file_diff(plan.root, file))
    results = [one for one in plan.results if options.module in load(one.name).modules]
    return _tell([one for one in results if not _applies(one)], _in_place([plan]))


def _edited_modules() -> list[str]:
    return sorted({module for fix in every_fix().values() for module in fix.modules})


def _apply(options: argparse.Namespace) -> int:
    """Apply the named fixes, or all, but those in CKPT_PATCHES_SKIP."""

    skip = Switches(os.environ).skip
    selections = select(options.fixes, options.tree)
    _check_rights(selections)
    found = [(selection, _applied(selection, skip)) for selection in selections]
    _tell_outcomes(found, options)
    outcomes = [outcome for _, own in found for outcome, _ in own.values()]
    if MEANING[Outcome.APPLIES] in outcomes and not options.json:
        runtime_commands.note(
            "ckpt-patches",
            "ckpt-patches status shows the result; ckpt-patches revert undoes it, pip uninstall does not",
        )
    return 1 if MEANING[Outcome.NO_MATCH] in outcomes else 0


def _applied(selection: Selection, skip: Collection[str]) -> Outcomes:
    """Apply the fixes of a package."""
    from ckpt_patches.inplace import rewrite

    before = rewrite.read_state(selection.root, selection.package).fixes
    plan = rewrite.apply(selection.root, selection.package, [name for name in selection.names if name not in skip])
    found = {one.name: (MEANING[one.outcome], one.reason) for one in plan.results if one.name in selection.names}
    found |= {name: ("already there", "") for name in before if name in selection.names}
    for name in set(skip).intersection(selection.names):
        found[name] = (SKIPPED, "it is applied in place, by an earlier run: revert it" if name in before else "")
    return found


def _tell_outcomes(found: Sequence[tuple[Selection, Outcomes]], options: argparse.Namespace) -> None:
    """Print JSON, or each fix that is not as asked for, or each of those that were named; and a line on the package."""
    if options.json:
        packages = [
            {
                "package": DISTRIBUTIONS[selection.package],
                "path": str(selection.root),
                "fixes": [{"name": name, "outcome": what, "reason": why} for name, (what, why) in own.items()],
            }
            for selection, own in found
        ]
        print(json.dumps({"schema": 1, "packages": packages}, indent=1))
        return
    for selection, own in found:
        for name, (what, why) in own.items():
            if options.fixes or terminal.Output.verbose or what in (SKIPPED, MEANING[Outcome.NO_MATCH]):
                print(f"{name}: {what}{f': {why}' if why else ''}", file=sys.stderr)
        counts = ", ".join(f"{number} {what}" for what, number in Counter(what for what, _ in own.values()).items())
        text = f"{DISTRIBUTIONS[selection.package]}: {counts or 'no fixes'} ({selection.root})"
        runtime_commands.note("ckpt-patches", text)


def _check_rights(selections: Sequence[Selection]) -> None:
    """Raise UserError, before the first change of any package, if the files of one cannot be replaced."""
    for selection in selections:
        for place in (selection.root, os.path.join(selection.root, *selection.package.split("."))):
            if not os.access(place, os.W_OK):
                raise UserError(f"{place}: no permission to write there; nothing of {selection.package} was changed")


def _revert(options: argparse.Namespace) -> int:
    from ckpt_patches.inplace import rewrite

    found: list[tuple[Selection, Outcomes]] = []
    for selection in select(options.fixes, options.tree):
        removed = rewrite.revert(selection.root, selection.package, selection.names)
        names = selection.names if options.fixes else removed
        words = {name: "reverted" if name in removed else "was not applied in place" for name in names}
        found.append((selection, {name: (what, "") for name, what in words.items()}))
    _tell_outcomes(found, options)
    return 0


def _tell(results: Sequence[FixResult], applied: Collection[str] = ()) -> int:
    """Report each fix's outcome on stderr; return 1 if one does not match, else 0. `applied`: those in place."""
    for result in results:
        reason = f": {result.reason}" if result.reason else ""
        said = "in place: revert it to see its diff" if result.name in applied else f"{MEANING[result.outcome]}{reason}"
        print(f"{result.name}: {said}", file=sys.stderr)
    return 1 if any(result.outcome is Outcome.NO_MATCH for result in results) else 0
