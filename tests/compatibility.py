"""Write docs/compatibility.md from records: every cell is a recorded result.

    python tests/compatibility.py

ckpt_patches/engine/outcomes.py has what each fix finds in each release. tests/conftest.py records the results of tests
marked `compat`: in tests/recorded/compatibility.json for runs over all releases (`make test-all`), and in
checkouts.json for runs on a checkout in place of a release (see tests/upstream.py). `is_kept` selects the results that
stay in the record. `make stacks` records stacks.json, `make upstream` upstream.json.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import generated
import keeping_up
from ckpt_patches.cli.status import FIXED_UPSTREAM, NOT_PRESENT
from ckpt_patches.engine.fix import package_of
from ckpt_patches.engine.installed import DISTRIBUTIONS
from ckpt_patches.engine.registry import FIXES
from generated import KNOWN
from recorded_results import ranges, read, write
from stacks import page as stacks_page
from stacks.rows import ROWS
from upstream import PLAN, RELEASES, REPOSITORY, newest_affected, runnable

RECORD = REPOSITORY / "tests" / "recorded" / "compatibility.json"
CHECKOUTS_RECORD = REPOSITORY / "tests" / "recorded" / "checkouts.json"
PAGE = REPOSITORY / "docs" / "compatibility.md"

Result = Mapping[str, Any]
# The cell text of each delivery when all tests passed.
COLUMNS = {"none": "bug shown", "hook": "fixed", "in place": "fixed"}
HEADS = ("package", "bug and fix shown on", "fixes")
SHOWN = tuple(COLUMNS.values())
NOT_RUN = "not run"
SKIPPED = "skipped"
NO_BUG = "-"
NOTHING_TO_DO = {FIXED_UPSTREAM, NOT_PRESENT}


def cell(results: Iterable[Result], passed: str) -> str:
    """The cell text for the results of all tests of one fix, release and delivery."""
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


def cells(results: list[Result]) -> tuple[str, ...]:
    """The cell text of each delivery for one fix and release. If the plan edits nothing, no test has to run."""
    planned = cell((result for result in results if result["delivery"] == PLAN), "")
    found = [
        cell((result for result in results if result["delivery"] == delivery), passed)
        for delivery, passed in COLUMNS.items()
    ]
    if planned in NOTHING_TO_DO:
        found = [NO_BUG if found[0] == NOT_RUN else found[0], *(planned if c == NOT_RUN else c for c in found[1:])]
    return tuple(found)


def by_release(fix: str, results: Iterable[Result]) -> dict[str, tuple[str, ...]]:
    """The cells of each release that can run here, oldest first."""
    mine = [result for result in results if result["fix"] == fix]
    releases = reversed(runnable(DISTRIBUTIONS[package_of(fix)]))
    return {version: cells([result for result in mine if result["version"] == version]) for version in releases}


def shown_on(fix: str, results: Iterable[Result]) -> str:
    """The releases on which tests showed both bug and fix."""
    return ", ".join(version for version, found in by_release(fix, results).items() if found == SHOWN) or NOT_RUN


def exceptions(fix: str, results: list[Result]) -> list[str]:
    """A line for each other result of a test run, with its reason."""
    found: dict[str, list[str]] = {}
    for version, of_one in by_release(fix, results).items():
        if of_one != SHOWN and {*of_one} - {NOT_RUN, NO_BUG, *NOTHING_TO_DO}:
            mine = [r for r in results if (r["fix"], r["version"]) == (fix, version) and r["outcome"] != "passed"]
            why = dict.fromkeys(result["reason"] for result in mine)
            found.setdefault(": ".join([" / ".join(of_one), *why]), []).append(version)
    return [f"- `{fix}`, {', '.join(versions)}: {words}" for words, versions in found.items()]


def notes(results: Iterable[Result]) -> list[str]:
    """The reasons why releases cannot run here, and the commits tested in place of releases."""
    why: dict[tuple[str, str], list[str]] = {}
    for release in RELEASES:
        if release.note:
            why.setdefault((release.distribution, release.note), []).append(release.version)
    commits = {
        (DISTRIBUTIONS[package_of(r["fix"])], r["version"], r["commit"], r["commit_date"])
        for r in results
        if "commit" in r
    }
    return [
        *(f"- {name} {ranges(releases, KNOWN[name])}, not run: {note}" for (name, note), releases in why.items()),
        *(f"- {name} {version}: commit {commit[:10]} of {date}" for name, version, commit, date in sorted(commits)),
    ]


def table(results: list[Result]) -> str:
    """A row for all fixes of a package that were shown on the same releases, then notes and exceptions."""
    rows: dict[tuple[str, str], list[str]] = {}
    for fix in FIXES:
        rows.setdefault((DISTRIBUTIONS[package_of(fix)], shown_on(fix, results)), []).append(f"[`{fix}`]({fix}.md)")
    made = generated.table(HEADS, ((*where, ", ".join(fixes)) for where, fixes in rows.items()))
    return "\n".join([made, "", *notes(results), *(line for fix in FIXES for line in exceptions(fix, results))])


def runs(results: Iterable[Result]) -> str:
    """The dates and the Python and torch versions of the recorded tests."""
    dates: dict[str, set[str]] = {}
    for result in results:
        dates.setdefault(f"Python {result['python']}, torch {result['torch']}", set()).add(result["date"])
    found = (f"{on}, {' to '.join(dict.fromkeys((min(days), max(days))))}" for on, days in sorted(dates.items()))
    return "Recorded: " + ("; ".join(found) or "nothing yet") + "."


def blocks(record: Mapping[str, Result]) -> dict[str, str]:
    """The generated blocks of the page, from the results by test."""
    results = list(record.values())
    unknown = sorted({result["fix"] for result in results} - FIXES.keys())
    if unknown:
        raise ValueError(f"{RECORD}: no such fix: {', '.join(unknown)}; the fixes are {', '.join(FIXES)}")
    return {"runs": runs(results), "fixes": table(results)}


def recorded() -> dict[str, Result]:
    """The recorded results by test, on releases and on checkouts in their place."""
    return {test: rows[0] for path in (RECORD, CHECKOUTS_RECORD) for test, rows in read(path).items()}


def is_kept(result: Result) -> bool:
    """Whether to keep a result: that of a plan, of a release in a stack, or of the newest release with the bug."""
    distribution = DISTRIBUTIONS[package_of(result["fix"])]
    named = {"megatron-core": "megatron", "deepspeed": "deepspeed", "nvidia-resiliency-ext": "nvrx"}.get(distribution)
    of_rows = {getattr(row, named) for row in ROWS} if named else {}
    on = (distribution, result["version"])
    return result["delivery"] == PLAN or result["version"] in of_rows or on == newest_affected(result["fix"])


def prune() -> None:
    """Remove results that are not kept from the record."""
    record = read(RECORD)
    kept = {test: [one for one in rows if is_kept(one)] for test, rows in record.items()}
    write(RECORD, {test: rows for test, rows in kept.items() if rows})


if __name__ == "__main__":
    generated.require(RECORD)
    prune()
    looks = keeping_up.section(keeping_up.recorded())
    generated.write(PAGE, {**blocks(recorded()), "stacks": stacks_page.section(), "upstream": looks})
