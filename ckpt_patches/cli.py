"""The command `ckpt-patches`: status, diff, apply, revert, and the tools."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_patches import __version__, completion
from ckpt_patches.audit import command as audit
from ckpt_patches.engine.plan import FixResult, Outcome, TreePlan, plan_tree
from ckpt_patches.engine.registry import FIXES, TARGETS
from ckpt_patches.engine.trees import select
from ckpt_patches.errors import UserError
from ckpt_patches.fingerprint import command as fingerprint
from ckpt_patches.migrate import command as migrate
from ckpt_patches.options import spelled

if TYPE_CHECKING:
    from ckpt_patches.fingerprint.states import Fingerprint
    from ckpt_patches.status import Installed, Status

EXAMPLES = """examples:
  ckpt-patches status                                  what is installed, and what every fix does here
  ckpt-patches status --tree ~/Megatron-LM             the same where scripts run in a checkout
  ckpt-patches status --json | jq .fixes               the same for programs
  ckpt-patches list                                    every fix in a sentence, and the releases that it is for
  ckpt-patches diff --tree ~/Megatron-LM > fix.patch   then: git -C ~/Megatron-LM apply fix.patch
  ckpt-patches diff zarr_create_synchronizer --tree ~/Megatron-LM --with-test
  ckpt-patches diff --split patches --tree ~/Megatron-LM
                                                       then: git -C ~/Megatron-LM am patches/numpy2_product.patch
  ckpt-patches show --diff megatron.core.optimizer.distrib_optimizer
                                                       what the hook changes in a module that is installed
  ckpt-patches apply                                   write the fixes into the installed files (a Dockerfile's RUN)
  ckpt-patches revert numpy2_product                   take one out again, byte for byte
  ckpt-patches to-universal --help                     convert a ZeRO checkpoint to a universal one, in one pass
  ckpt-patches audit /checkpoints/run1                 which of these checkpoints are damaged, and where
  ckpt-patches fingerprint ONE --against OTHER         whether two checkpoints hold the same states
  ckpt-patches new-fix NAME --module megatron.core.optimizer.optimizer --upstream URL
                                                       begin a fix, in a clone (CONTRIBUTING.md)
  source <(ckpt-patches completion bash)               complete commands, options and fixes (or zsh), in ~/.bashrc
  ckpt-patches migrate OLD --output NEW                make of an old Megatron checkpoint one that 0.16 and later load

exit status: 0 all is well, 1 a fix that is needed is missing, or a checkpoint is damaged, 2 wrong usage, or a file that
cannot be worked on, 3 of a checkpoint it cannot be told whether it is damaged
"""

TO_UNIVERSAL = "to-universal"

MEANING = {
    Outcome.APPLIES: "applied",
    Outcome.ALREADY_THERE: "already there",
    Outcome.NOT_PRESENT: "not present in this release",
    Outcome.NO_MATCH: "NO MATCH",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == [TO_UNIVERSAL]:
        from deepspeed_patches.ds_to_universal import command

        return command.main(arguments[1:], program=f"ckpt-patches {TO_UNIVERSAL}")
    options = _parsers()[0].parse_args(spelled(arguments))
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except UserError as error:
        print(f"ckpt-patches: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ckpt-patches: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The command's, and that of each command in it."""
    parser = argparse.ArgumentParser(
        "ckpt-patches",
        description="Checkpoint fixes for megatron-core and DeepSpeed.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    status = commands.add_parser("status", help="what is installed, and what every fix does here")
    status.add_argument("--json", action="store_true", help="for programs")
    status.add_argument(
        "--tree",
        metavar="PATH",
        help="a checkout that training scripts run in, or a --target folder (default: what this command imports)",
    )
    status.set_defaults(run=_status)
    listed = commands.add_parser("list", help="every fix: what it does, and the releases that it is for")
    listed.add_argument("--json", action="store_true", help="for programs")
    listed.set_defaults(run=_list)
    diff = commands.add_parser("diff", help="print the fixes as a unified diff against a tree")
    diff.add_argument("--with-test", action="store_true", help="add each fix's upstream-style regression test")
    diff.add_argument(
        "--split",
        type=Path,
        metavar="DIR",
        help="write each fix, with its test, into a file of its own there, as `git format-patch` does: for `git am`",
    )
    diff.set_defaults(run=_diff)
    show = commands.add_parser("show", help="print a module as the hook runs it, or what it changes there")
    show.add_argument("module", metavar="MODULE", help="as megatron.core.optimizer.distrib_optimizer")
    show.add_argument("--diff", action="store_true", help="the changes alone, as a unified diff")
    show.set_defaults(run=_show)
    apply = commands.add_parser("apply", help="write the fixes into a tree's files")
    apply.set_defaults(run=_apply)
    revert = commands.add_parser("revert", help="take applied fixes out of a tree's files again")
    revert.set_defaults(run=_revert)
    # Its options are its own module's, which the other commands do without.
    commands.add_parser(TO_UNIVERSAL, help="convert a DeepSpeed ZeRO checkpoint to a universal one", add_help=False)
    audit.add_to(commands, _fingerprints_of_zero)
    migrate.add_to(commands)
    fingerprint.add_to(commands, _fingerprints_of_zero)
    for command in (diff, apply, revert):
        command.add_argument("fixes", nargs="*", metavar="FIX", help=f"of these (default: all): {', '.join(FIXES)}")
    for command in (diff, show, apply, revert):
        command.add_argument(
            "--tree",
            metavar="PATH",
            help="a checkout, site-packages or --target folder (default: what this Python imports)",
        )
    new = commands.add_parser("new-fix", help="make the files of a fix that you write, in a clone of this repository")
    new.add_argument("name", metavar="NAME", help="for the bug, as universal_step")
    new.add_argument("--module", required=True, help="which the fix edits, as megatron.core.optimizer.optimizer")
    new.add_argument("--upstream", required=True, metavar="URL", help="of the report, or of the code that has the bug")
    new.set_defaults(run=_new_fix)
    completed = commands.add_parser("completion", help="print what a shell completes the command by")
    completed.add_argument("shell", choices=completion.SHELLS)
    completed.set_defaults(run=_completion)
    return parser, commands.choices


def _new_fix(options: argparse.Namespace) -> int:
    from ckpt_patches import new_fix
    from ckpt_patches.formats.durable import replace_durably

    root = new_fix.repository()
    for path, text in new_fix.files(root, options.name, options.module, options.upstream).items():
        replace_durably(path, text.encode())
        print(path.relative_to(root))
    print(new_fix.NEXT.format(name=options.name, folder=new_fix.folder_of(options.module), changes=new_fix.CHANGES))
    return 0


def _completion(options: argparse.Namespace) -> int:
    from deepspeed_patches.ds_to_universal import command

    parsers = {**_parsers()[1], TO_UNIVERSAL: command.parser(TO_UNIVERSAL)}
    words = {
        **dict.fromkeys(("diff", "apply", "revert"), FIXES),
        "show": _edited_modules(),
        "completion": completion.SHELLS,
    }
    print(completion.script(parsers, words, options.shell), end="")
    return 0


def _fingerprints_of_zero(path: Path, trust: bool) -> "Iterator[Fingerprint]":
    from deepspeed_patches.ds_to_universal.fingerprints import fingerprints

    return fingerprints(path, trust=trust)


def _status(options: argparse.Namespace) -> int:
    from ckpt_patches import status

    found = status.collect(options.tree)
    if options.json:
        print(json.dumps({**asdict(found), "complete": found.complete}, indent=1))
    else:
        _print_status(found)
    return 0 if found.complete else 1


def _list(options: argparse.Namespace) -> int:
    from ckpt_patches.engine.fix import load, sentence

    fixes = [(load(name), sentence(name)) for name in FIXES]
    if options.json:
        rows = [
            {"name": fix.name, "does": does, "affected": fix.affected, "upstream": fix.upstream} for fix, does in fixes
        ]
        print(json.dumps({"fixes": rows}, indent=1))
        return 0
    for fix, does in fixes:
        print(f"{fix.name}\n  {does}\n  {fix.affected}")
    return 0


def _print_status(found: "Status") -> None:
    from ckpt_patches.status import python

    print(f"training-checkpoint-patches {found.version}, mode {found.mode}, {python()}")
    print(f"import hook: {'active' if found.hook_active else f'NOT ACTIVE: {found.hook_reason}'}\n")
    _print_table([_row(package) for package in found.installed])
    print()
    _print_table([(fix.name, fix.state, fix.reason) for fix in found.fixes])
    for warning in found.warnings:
        print(f"\nwarning: {warning}")


def _row(package: "Installed") -> tuple[str, ...]:
    why = f"({package.why})" if package.why else ""
    return package.name, package.version or "not installed", f"{package.location or ''} {why}".strip()


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _diff(options: argparse.Namespace) -> int:
    from ckpt_patches.engine.diffs import tree_diff

    if options.split is not None:
        return _split(options)
    plans = [plan_tree(s.root, s.package, s.names, for_upstream=True) for s in select(options.fixes, options.tree)]
    _raise_unreadable(plans)
    for plan in plans:
        sys.stdout.buffer.write(tree_diff(plan, with_test=options.with_test))
    sys.stdout.flush()
    return _tell([r for plan in plans for r in plan.results if r.outcome is not Outcome.APPLIES])


def _split(options: argparse.Namespace) -> int:
    """Each of them against the tree as it is: one pull request a fix, in any order."""
    from ckpt_patches.engine.mails import author_of, mail
    from ckpt_patches.formats.durable import make_folder, replace_durably

    results: list[FixResult] = []
    for tree in select(options.fixes, options.tree):
        for name in tree.names:
            plan = plan_tree(tree.root, tree.package, [name], for_upstream=True)
            _raise_unreadable([plan])
            results += plan.results
            if plan.named(Outcome.APPLIES):
                make_folder(options.split)
                path = options.split / f"{name}.patch"
                replace_durably(path, mail(plan, name, author_of(tree.root)))
                print(path)
    return _tell([result for result in results if result.outcome is not Outcome.APPLIES])


def _show(options: argparse.Namespace) -> int:
    """The whole module with all fixes that are not switched off; what was written into the file already is in it."""
    from ckpt_patches import Switches
    from ckpt_patches.engine.diffs import file_diff
    from ckpt_patches.engine.plan import fixes_for, module_path

    edited = _edited_modules()
    if options.module not in edited:
        names = "".join(f"\n  {module}" for module in edited)
        raise UserError(f"expected a module that a fix edits, found {options.module}; these are {names}")
    package = TARGETS[options.module]
    (tree,) = (s for s in select([n for n, m in FIXES.items() if options.module in m], options.tree))
    switches = Switches(os.environ)
    plan = plan_tree(tree.root, package, fixes_for(package, switches.skip, switches.overlays))
    _raise_unreadable([plan])
    file = plan.files.get(options.module)
    path = Path(module_path(tree.root, options.module))
    if file is None and not path.exists():
        raise UserError(f"expected {path}, found no such file: this release does not have the module")
    if file is not None:
        sys.stdout.buffer.write(file_diff(plan.root, file) if options.diff else file.patched)
    elif not options.diff:
        sys.stdout.buffer.write(path.read_bytes())
    sys.stdout.flush()
    return _tell([one for one in plan.results if options.module in FIXES[one.name]])


def _edited_modules() -> list[str]:
    return sorted({module for modules in FIXES.values() for module in modules})


def _apply(options: argparse.Namespace) -> int:
    from ckpt_patches.inplace import rewrite

    results: list[FixResult] = []
    for selection in select(options.fixes, options.tree):
        before = rewrite.read_state(selection.root, selection.package).fixes
        plan = rewrite.apply(selection.root, selection.package, selection.names)
        results += [_as_before(r, before) for r in plan.results if r.name in selection.names]
    return _tell(results)


def _as_before(result: FixResult, before: Sequence[str]) -> FixResult:
    """A fix that an earlier run applied is there already."""
    if result.outcome is Outcome.APPLIES and result.name in before:
        return FixResult(result.name, Outcome.ALREADY_THERE)
    return result


def _revert(options: argparse.Namespace) -> int:
    from ckpt_patches.inplace import rewrite

    for selection in select(options.fixes, options.tree):
        removed = rewrite.revert(selection.root, selection.package, selection.names)
        for name in selection.names:
            print(f"{name}: {'reverted' if name in removed else 'was not applied in place'}", file=sys.stderr)
    return 0


def _raise_unreadable(plans: Sequence[TreePlan]) -> None:
    for plan in plans:
        for result in plan.results:
            if result.unreadable:
                raise UserError(result.reason)


def _tell(results: Sequence[FixResult]) -> int:
    """Say on stderr what each fix did; 1 if one does not match."""
    for result in results:
        reason = f": {result.reason}" if result.reason else ""
        print(f"{result.name}: {MEANING[result.outcome]}{reason}", file=sys.stderr)
    return 1 if any(result.outcome is Outcome.NO_MATCH for result in results) else 0
