"""The commands on fixes: status, list, diff, apply, revert."""

import argparse
import json
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_patches import Switches
from ckpt_patches.engine.fix import every_fix, load, sentence, with_dependencies
from ckpt_patches.engine.installed import DISTRIBUTIONS
from ckpt_patches.engine.plan import FixResult, Outcome, TreePlan, fixes_for, plan_tree
from ckpt_patches.engine.registry import PACKAGES
from ckpt_patches.engine.releases import recorded_release
from ckpt_patches.engine.trees import Selection, root_of, select
from ckpt_patches.errors import UserError
from ckpt_patches.runtime import terminal
from ckpt_patches.runtime.commands import note

if TYPE_CHECKING:
    from ckpt_patches.engine.fix import Fix

# Version of the JSON of status and list; increased when a key is renamed, removed or changes its meaning.
SCHEMA = 2
COLUMNS = 80  # of a list in a pipe
Outcomes = dict[str, tuple[str, str]]  # of apply and revert, by fix: the outcome and its reason
SILENT = "Silent: wrong state without an error"
VISIBLE = "Visible: an error, a hang or high memory use"
APPLIED, NO_MATCH = "applied", "NO MATCH"
MEANING = {Outcome.APPLIES: APPLIED, Outcome.NOT_NEEDED: "not needed", Outcome.NO_MATCH: NO_MATCH}
SKIPPED = "not applied (CKPT_PATCHES_SKIP)"


def run_status(options: argparse.Namespace) -> int:
    """`ckpt-patches status`."""
    from ckpt_patches.cli import status

    found = status.collect(options.tree, options.require)
    if options.json:
        fixes = [{**asdict(fix), "package": DISTRIBUTIONS[fix.package]} for fix in found.fixes]
        print(json.dumps({"schema": SCHEMA, **asdict(found), "fixes": fixes, "complete": found.complete}, indent=1))
    else:
        print(status.as_text(found))
    return 0 if found.complete else 1


def run_list(options: argparse.Namespace) -> int:
    """`ckpt-patches list`."""
    names, unmatched = _listed(options)
    fixes = [load(name) for name in names]
    if options.json:
        print(json.dumps({"schema": SCHEMA, "fixes": [_as_json(fix) for fix in fixes]}, indent=1))
    else:
        for title, silent in ((SILENT, True), (VISIBLE, False)):
            if own := [_entry(fix) for fix in fixes if fix.silent is silent]:
                print("\n".join([terminal.paint(title, "bold"), *own]), end="\n\n")
        if not fixes:
            print("no fix applies")
    return _tell(unmatched)


def _entry(fix: "Fix") -> str:
    """A fix with its releases, and the symptom below it; wrapped, in a pipe as well."""
    first = "; ".join(filter(None, (f"{fix.name}: {fix.affected}", fix.stacks)))
    fill = partial(textwrap.fill, width=terminal.width() or COLUMNS, break_on_hyphens=False, subsequent_indent="    ")
    return f"{fill(first)}\n{fill(fix.symptom, initial_indent='  ')}"


def _listed(options: argparse.Namespace) -> tuple[list[str], list[FixResult]]:
    """The fixes to list, and for a tree the results of those that do not match it."""
    if sum((bool(options.release), options.all, options.tree is not None)) > 1:
        raise UserError("expected one of --for, --all and --tree, found several")
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
    results = [result for plan in plans for result in plan.results]
    applied = _in_place(plans)
    present = [one.name for one in results if one.name in applied or one.outcome is Outcome.APPLIES]
    return present, [one for one in results if one.outcome is Outcome.NO_MATCH]


def _in_place(plans: "Iterable[TreePlan | Selection]") -> set[str]:
    """The fixes that the files of these trees have already."""
    from ckpt_patches.inplace import rewrite

    return {name for plan in plans for name in rewrite.in_place(plan.root, plan.package).fixes}


def _as_json(fix: "Fix") -> dict[str, object]:
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


def run_diff(options: argparse.Namespace) -> int:
    """`ckpt-patches diff`."""
    from ckpt_patches.engine.diffs import tree_diff

    if options.split is not None:
        return _split(options)
    plans = []
    for own in select(options.fixes, options.tree):
        wanted = with_dependencies(own.names)
        names = [name for name in fixes_for(own.package) if name in wanted]
        plans.append(plan_tree(own.root, own.package, names, for_upstream=True))
        plans[-1].check_readable()
    for plan in plans:
        sys.stdout.buffer.write(tree_diff(plan, with_test=options.with_test))
    return _tell([result for plan in plans for result in plan.results], _in_place(plans))


def _split(options: argparse.Namespace) -> int:
    """Write a numbered series for `git am`; for several packages, one series each."""
    from ckpt_patches.engine.format_patch import plan_series

    selected = select(options.fixes, options.tree)
    results: list[FixResult] = []
    for tree in selected:
        series = plan_series(tree.root, tree.package, tree.names)
        results += series.results
        folder = options.split if len(selected) == 1 else options.split / DISTRIBUTIONS[tree.package]
        if series.files:
            _write_patches(folder, series.files)
    return _tell(results, _in_place(selected))


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


def _tell(results: Sequence[FixResult], applied: Collection[str] = ()) -> int:
    """Report on stderr each fix that does not apply; return 1 if one does not match. `applied`: those in place."""
    for result in results:
        if result.name in applied:
            print(f"{result.name}: in place: revert it to see its diff", file=sys.stderr)
        elif result.outcome is not Outcome.APPLIES:
            reason = f": {result.reason}" if result.reason else ""
            print(f"{result.name}: {MEANING[result.outcome]}{reason}", file=sys.stderr)
    return 1 if any(result.outcome is Outcome.NO_MATCH for result in results) else 0


def run_apply(options: argparse.Namespace) -> int:
    """`ckpt-patches apply`: the named fixes, or all, but those in CKPT_PATCHES_SKIP."""
    skip = Switches(os.environ).skip
    selections = select(options.fixes, options.tree)
    _check_rights(selections)
    found = [(selection, _applied(selection, skip)) for selection in selections]
    _tell_outcomes(found, options)
    outcomes = [outcome for _, own in found for outcome, _ in own.values()]
    if APPLIED in outcomes and not options.json:
        undo = "ckpt-patches status shows the result; ckpt-patches revert undoes it, pip uninstall does not"
        note("ckpt-patches", undo)
    return 1 if NO_MATCH in outcomes else 0


def _check_rights(selections: Sequence[Selection]) -> None:
    """Raise UserError, before the first change of any package, if the files of one cannot be replaced."""
    for selection in selections:
        for place in (selection.root, os.path.join(selection.root, *selection.package.split("."))):
            if not os.access(place, os.W_OK):
                raise UserError(f"{place}: no permission to write there; nothing of {selection.package} was changed")


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


def run_revert(options: argparse.Namespace) -> int:
    """`ckpt-patches revert`."""
    from ckpt_patches.inplace import rewrite

    found: list[tuple[Selection, Outcomes]] = []
    for selection in select(options.fixes, options.tree):
        removed = rewrite.revert(selection.root, selection.package, selection.names)
        names = selection.names if options.fixes else removed
        words = {name: "reverted" if name in removed else "was not applied in place" for name in names}
        found.append((selection, {name: (what, "") for name, what in words.items()}))
    _tell_outcomes(found, options)
    return 0


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
            if options.fixes or terminal.Output.verbose or what in (SKIPPED, NO_MATCH):
                print(f"{name}: {what}{f': {why}' if why else ''}", file=sys.stderr)
        counts = ", ".join(f"{number} {what}" for what, number in Counter(what for what, _ in own.values()).items())
        note("ckpt-patches", f"{DISTRIBUTIONS[selection.package]}: {counts or 'no fixes'} ({selection.root})")
