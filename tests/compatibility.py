"""Write docs/compatibility.md from the recorded test results: every cell is a result, never a claim.

    python tests/compatibility.py

The results are those of the tests marked `compat`, which tests/conftest.py records in tests/recorded/compatibility.json
when they run over all releases (`make test-all`), and in tests/recorded/main.json when they run on a checkout of a main
branch (see tests/upstream.py). Those of stacks are in tests/recorded/stacks.json, by `make stacks`.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import generated
from ckpt_patches.cli.status import FIXED_UPSTREAM, NOT_PRESENT
from ckpt_patches.engine.fix import package_of
from ckpt_patches.engine.installed import DISTRIBUTIONS
from ckpt_patches.engine.registry import FIXES
from generated import KNOWN
from recorded_results import ranges, read
from stacks import page as stacks_page
from upstream import MAIN, PLAN, RELEASES, REPOSITORY, runnable

RECORD = REPOSITORY / "tests" / "recorded" / "compatibility.json"
MAIN_RECORD = REPOSITORY / "tests" / "recorded" / "main.json"
PAGE = REPOSITORY / "docs" / "compatibility.md"

Result = Mapping[str, Any]
# Delivery: the head of its column, and a cell's words where all of its tests passed.
COLUMNS = {
    "none": ("without the fix", "bug shown"),
    "hook": ("import hook", "fixed"),
    "in place": ("in place", "fixed"),
}
HEADS = {PLAN: "plan", **{delivery: head for delivery, (head, _) in COLUMNS.items()}}
COMMIT_DIGITS = 10
NOT_RUN = "not run"
SKIPPED = "skipped"
NO_BUG = "-"
NOTHING_TO_DO = {FIXED_UPSTREAM, NOT_PRESENT}

# What the cells of a release can be, by the column of the page that it then stands in.
GROUPS = {
    "bug shown, fixed": ("bug shown", "fixed", "fixed"),
    "fixed upstream": (NO_BUG, FIXED_UPSTREAM, FIXED_UPSTREAM),
    "not present": (NO_BUG, NOT_PRESENT, NOT_PRESENT),
}
OTHER = "other"


def cell(results: Iterable[Result], passed: str) -> str:
    """The words for the results of all tests of one fix, release and delivery."""
    results = list(results)
    outcomes = {result["outcome"] for result in results}
    if not results:
        return NOT_RUN
    if "failed" in outcomes:
        return "**FAILED**"
    if outcomes == {SKIPPED}:
        return SKIPPED
    words = {result["words"] for result in results if result["outcome"] == "passed" and result["words"]}
    return ", ".join(sorted(words)) or passed


def cells(results: list[Result]) -> list[str]:
    """The cells of one fix and release; for what was planned and not run, what the plan found.

    Where a plan finds nothing to do, there is nothing to run.
    """
    planned = cell((result for result in results if result["delivery"] == PLAN), "")
    found = [
        cell((result for result in results if result["delivery"] == delivery), passed)
        for delivery, (_, passed) in COLUMNS.items()
    ]
    if planned in NOTHING_TO_DO:
        found = [NO_BUG if found[0] == NOT_RUN else found[0], *(planned if c == NOT_RUN else c for c in found[1:])]
    return found if planned == NOT_RUN else [f"planned ({planned}), not run" if c == NOT_RUN else c for c in found]


def name(result: Result) -> str:
    """A release, or which commit of the main branch."""
    if result["version"] != MAIN:
        return str(result["version"])
    return f"{MAIN} {result['commit'][:COMMIT_DIGITS]} of {result['commit_date']}"


def row(fix: str, results: list[Result]) -> str:
    """A fix's line: in each column the releases of its upstream package, and commits of its main branch."""
    distribution = DISTRIBUTIONS[package_of(fix)]
    mine = [result for result in results if result["fix"] == fix]
    found: dict[tuple[str, ...], list[str]] = {}
    for release in [*reversed(runnable(distribution)), *commits(distribution, results)]:
        of_release = cells([result for result in mine if name(result) == release])
        found.setdefault(tuple(of_release), []).append(release)
    columns = [named(found.pop(group, []), distribution) for group in GROUPS.values()]
    others = (f"{named(releases, distribution)}: {in_words(of_one)}" for of_one, releases in found.items())
    return generated.line([f"[`{fix}`]({fix}.md)", *columns, "; ".join(others)])


def commits(distribution: str, results: Iterable[Result]) -> list[str]:
    """Of a package's main branch, those on which any fix was tested."""
    on_main = [r for r in results if r["version"] == MAIN and DISTRIBUTIONS[package_of(r["fix"])] == distribution]
    return [commit for _, commit in sorted({(result["commit_date"], name(result)) for result in on_main})]


def named(releases: Iterable[str], distribution: str) -> str:
    """Releases as ranges, and commits of the main branch."""
    chosen = list(releases)
    on_main = [release for release in chosen if release.startswith(MAIN)]
    return ", ".join(filter(None, [ranges(chosen, KNOWN[distribution]), *on_main]))


def in_words(of_release: tuple[str, ...]) -> str:
    """The cells of a release, or one word if they are the same."""
    return " / ".join(of_release if len(set(of_release)) > 1 else of_release[:1])


def reasons(distribution: str, results: Sequence[Result]) -> list[str]:
    """Why releases cannot be run, and why tests were skipped or failed; which commit stands for a release."""
    notes: dict[str, list[str]] = {}
    for release in RELEASES:
        if release.distribution == distribution and release.note:
            notes.setdefault(release.note, []).append(release.version)
    without = [f"- {named(releases, distribution)}, not run: {note}" for note, releases in notes.items()]
    told: dict[tuple[str, ...], list[str]] = {}
    for result in results:
        if result["outcome"] != "passed" and result["reason"] not in notes:
            why = (result["fix"], HEADS[result["delivery"]], result["outcome"], result["reason"])
            told.setdefault(why, []).append(name(result))
    of_checkouts = {(r["version"], r["commit"], r["commit_date"]) for r in results if "commit" in r}
    without += [
        f"- {version}: commit {commit[:COMMIT_DIGITS]} of {date}"
        for version, commit, date in sorted(of_checkouts)
        if version != MAIN
    ]
    return without + [
        f"- `{fix}`, {named(dict.fromkeys(releases), distribution)}, {delivery}, {outcome}: {reason}"
        for (fix, delivery, outcome, reason), releases in sorted(told.items())
    ]


def table(package: str, results: list[Result]) -> str:
    """The rows of all fixes of an upstream package, and what they do not explain."""
    heads = generated.table(["fix", *GROUPS, OTHER], [])
    rows = [row(fix, results) for fix in FIXES if package_of(fix) == package]
    why = reasons(DISTRIBUTIONS[package], [result for result in results if package_of(result["fix"]) == package])
    return "\n".join([heads, *rows, *(["", *why] if why else [])])


def runs(results: Iterable[Result]) -> str:
    """When, and on what, the recorded tests ran."""
    dates: dict[str, set[str]] = {}
    for result in results:
        dates.setdefault(f"Python {result['python']}, torch {result['torch']}", set()).add(result["date"])
    found = (f"{on}, {' to '.join(dict.fromkeys((min(days), max(days))))}" for on, days in sorted(dates.items()))
    return "Recorded: " + ("; ".join(found) or "nothing yet") + "."


def blocks(record: Mapping[str, Result]) -> dict[str, str]:
    """The parts of the page, from the record by test."""
    results = list(record.values())
    unknown = sorted({result["fix"] for result in results} - FIXES.keys())
    if unknown:
        raise ValueError(f"{RECORD}: no such fix: {', '.join(unknown)}; the fixes are {', '.join(FIXES)}")
    packages = dict.fromkeys(map(package_of, FIXES))
    return {"runs": runs(results), **{DISTRIBUTIONS[package]: table(package, results) for package in packages}}


def recorded() -> dict[str, Result]:
    """What there is on the disk: the results on releases, and on main branches."""
    return {test: rows[0] for path in (RECORD, MAIN_RECORD) for test, rows in read(path).items()}


if __name__ == "__main__":
    generated.require(RECORD)
    generated.write(PAGE, {**blocks(recorded()), "stacks": stacks_page.section()})
