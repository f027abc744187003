"""Fixes as a numbered series of patches: each applies on top of its dependencies only, and all apply in order."""

import difflib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ckpt_patches.engine.diffs import lines_of, new_file_diff, unified_diff, upstream_test
from ckpt_patches.engine.fix import load
from ckpt_patches.engine.plan import FilePlan, FixResult, Outcome, fixes_for, plan_tree

CONTEXTS = (3, 5, 8, 12, 20, 40)  # lines of context around a change: the fewest that make its place unique


@dataclass(frozen=True)
class Patch:
    """One fix as a change to a tree that has the fix's dependencies."""

    name: str  # of the fix
    depends_on: tuple[str, ...]  # fixes that come earlier in the series
    change: bytes  # unified diff of the edited files
    test: bytes  # unified diff that adds the regression test; empty if there is none


@dataclass(frozen=True)
class Series:
    """The patches of one upstream package in order, and the outcome of every requested fix and its dependencies."""

    patches: tuple[Patch, ...]
    results: tuple[FixResult, ...]


def plan_series(root: str, package: str, names: Iterable[str]) -> Series:
    """Plan the patches of these fixes and their dependencies against a tree."""
    wanted = with_dependencies(names, lambda name: load(name).depends_on)
    plans = {name: plan_tree(root, package, [name], for_upstream=True) for name in fixes_for(package) if name in wanted}
    results = {name: plan.results[0] for name, plan in plans.items()}
    for name, result in results.items():
        unmet = [other for other in load(name).depends_on if results[other].outcome is Outcome.NO_MATCH]
        if result.outcome is Outcome.APPLIES and unmet:
            reason = f"it depends on {unmet[0]}, which does not match: {results[unmet[0]].reason}"
            results[name] = FixResult(name, Outcome.NO_MATCH, reason)
    applied = {name: plan for name, plan in plans.items() if results[name].outcome is Outcome.APPLIES}
    places = {name: {m: _place(file) for m, file in plan.files.items()} for name, plan in applied.items()}
    dependencies: dict[str, tuple[str, ...]] = {}
    for name, own in places.items():
        dependencies[name] = tuple(
            other
            for other in dependencies
            if other in load(name).depends_on
            or any(_disturbs(places[other][module], own[module]) for module in own if module in places[other])
        )
    patches = [_patch(root, package, name, dependencies, places[name]) for name in applied]
    return Series(tuple(patches), tuple(results.values()))


def with_dependencies(names: Iterable[str], of: Callable[[str], Iterable[str]]) -> set[str]:
    """These fixes and all their dependencies."""
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += of(name)
    return found


@dataclass(frozen=True)
class _Place:
    """Where a patch changes one file, as half-open ranges of zero-based lines of the original."""

    changes: tuple[tuple[int, int], ...]  # the replaced lines; empty ranges for insertions
    hunks: tuple[tuple[int, int], ...]  # the same with their context
    end: int  # number of lines in the file
    context: int  # lines around a change


def _place(file: FilePlan) -> _Place:
    matcher = difflib.SequenceMatcher(None, lines_of(file.original), lines_of(file.patched))  # as in unified_diff
    changes = [(low, high) for tag, low, high, _, _ in matcher.get_opcodes() if tag != "equal"]
    context = next((n for n in CONTEXTS if _is_found_once(lines_of(file.original), _hunks(matcher, n))), CONTEXTS[-1])
    return _Place(tuple(changes), tuple(_hunks(matcher, context)), len(lines_of(file.original)), context)


def _hunks(matcher: "difflib.SequenceMatcher[bytes]", context: int) -> list[tuple[int, int]]:
    return [(group[0][1], group[-1][2]) for group in matcher.get_grouped_opcodes(context)]


def _is_found_once(lines: list[bytes], hunks: list[tuple[int, int]]) -> bool:
    """Whether the lines of each hunk occur only once: after other patches git has to search for them."""
    text = b"\n" + b"".join(lines)
    return all(text.count(b"\n" + b"".join(lines[start:stop])) == 1 for start, stop in hunks)


def _disturbs(first: _Place, second: _Place) -> bool:
    """Whether the first patch changes, or inserts between, lines that a hunk of the second one has to find."""
    return any(
        (low < stop and high > start) or low == start == 0 or high == stop == second.end
        for low, high in first.changes
        for start, stop in second.hunks
    )


def _patch(
    root: str, package: str, name: str, dependencies: dict[str, tuple[str, ...]], places: dict[str, _Place]
) -> Patch:
    """The patch of a fix against a tree that has its direct and indirect dependencies."""
    needed = with_dependencies([name], dependencies.__getitem__)
    before, after = (
        plan_tree(root, package, [other for other in dependencies if other in names], for_upstream=True)
        for names in (needed - {name}, needed)
    )
    parts = []
    for module, place in places.items():
        file = after.files[module]
        path = Path(os.path.relpath(file.path, root)).as_posix()
        text = before.files[module].patched if module in before.files else file.original
        parts.append(unified_diff(f"a/{path}", f"b/{path}", text, file.patched, place.context))
    test = new_file_diff(*upstream_test(name)) if load(name).test else b""
    return Patch(name, dependencies[name], b"".join(parts), test)
