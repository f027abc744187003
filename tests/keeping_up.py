"""Compare the newest release and the main branch of each upstream package with their last record.

    make upstream

plans all fixes on each and, for a new version, runs the demonstrations without and with the fix, like the fixes'
contract. It prints the differences from tests/recorded/upstream.json, updates it, and exits with 1 if a version was not
available. CKPT_PATCHES_TEST_MEGATRON_MAIN etc. name a checkout; otherwise the branch is cloned into .trees/.
"""

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import generated
from ckpt_patches.demo.run import DemonstrationFailed
from ckpt_patches.engine.installed import DISTRIBUTIONS
from ckpt_patches.engine.plan import FixResult, Outcome, fixes_for, plan_tree
from ckpt_patches.engine.registry import APEX, CORE, DEEPSPEED, FIXES, NVRX, SWITCHED
from ckpt_patches.runtime.durable import replace_durably
from stacks import environments
from stacks.environments import NotInstalled
from stacks.rows import MEGATRON_LM
from upstream import (
    CHECKOUT_VARIABLES,
    MAIN,
    MAIN_VARIABLES,
    REPOSITORY,
    demonstrate_on,
    installed_checkout,
    released,
    trees,
)

RECORD = REPOSITORY / "tests" / "recorded" / "upstream.json"
REPOSITORIES = {
    CORE: MEGATRON_LM,
    DEEPSPEED: "https://github.com/deepspeedai/DeepSpeed",
    NVRX: "https://github.com/NVIDIA/nvidia-resiliency-ext",
    APEX: "https://github.com/NVIDIA/apex",
}
INSIDE = {NVRX: "src"}  # the folder of a repository that goes on the path
# By default pip finds only releases for this Python and system; tests/upstream.py also installs others.
TARGET = ("--ignore-requires-python", "--python-version=3.12", "--platform=manylinux_2_39_x86_64")
WORKS, NO_MATCH = "works", Outcome.NO_MATCH.value
WORDS = {
    Outcome.APPLIES.value: "matched",
    Outcome.ALREADY_THERE.value: "fixed upstream",
    NO_MATCH: "no match",
    Outcome.NOT_PRESENT.value: "not present",
}
Seen = Mapping[str, Any]  # version, date, plans (text by fix), shown (text by fix)


@dataclass(frozen=True)
class Subject:
    """A release, or a commit of a main branch."""

    package: str
    name: str  # "deepspeed, newest release"
    version: str  # "0.19.8", or "edaa722126 of 2026-08-22"
    root: Path  # goes on the path


def main() -> int:
    record, lines, missed = recorded(), list[str](), False
    for package in REPOSITORIES:
        for name, find in (("newest release", released_newest), ("main", branch)):
            title = f"{DISTRIBUTIONS[package]}, {name}"
            try:
                subject = find(package, title)
            except NotInstalled as error:
                lines, missed = [*lines, f"- {title}: not looked at: {error}"], True
                continue
            if subject is None:
                continue
            before = record.get(title, {})
            record[title] = seen(subject, before)
            lines += report(title, before, record[title])
    replace_durably(RECORD, f"{json.dumps(record, indent=1, sort_keys=True)}\n".encode())
    print("\n".join(lines))
    return 1 if missed else 0


def recorded() -> dict[str, Any]:
    """The last record, by the titles of the subjects."""
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    return found


# Releases and branches


def released_newest(package: str, title: str) -> Subject | None:
    """The newest release on the package index; None for a package that is on no index."""
    distribution = DISTRIBUTIONS[package]
    if distribution in CHECKOUT_VARIABLES:
        return None
    compiled = [*TARGET[1:], "--only-binary=:all:"] if package == NVRX else []
    said = _run([sys.executable, "-m", "pip", "index", "versions", distribution, TARGET[0], *compiled])
    version = said.partition("(")[2].partition(")")[0]  # "deepspeed (0.19.8)"
    try:
        return Subject(package, title, version, released(distribution, version))
    except RuntimeError as error:
        raise NotInstalled(str(error).splitlines()[-1]) from error


def branch(package: str, title: str) -> Subject:
    """The newest commit of the main branch, or the checkout that a variable names."""
    distribution = DISTRIBUTIONS[package]
    variable = {**MAIN_VARIABLES, **CHECKOUT_VARIABLES}.get(distribution, "")
    folder = Path(os.environ.get(variable) or trees() / f"{distribution}-{MAIN}")
    if variable not in os.environ:
        environments.checkout("HEAD", folder, REPOSITORIES[package])
        os.environ.update({variable: str(folder)} if variable else {})  # so that `needed` finds it
    commit, date = _run(["git", "-C", str(folder), "log", "-1", "--format=%H %cs"]).split()
    root = installed_checkout(distribution, folder) if package == DEEPSPEED else folder / INSIDE.get(package, "")
    return Subject(package, title, f"{commit[:10]} of {date}", root)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise NotInstalled(f"{' '.join(command[:4])}: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
    return done.stdout


# Results of the fixes


def seen(subject: Subject, before: Seen) -> Seen:
    """The plan of each fix and, for a version that is not recorded, whether the fix works."""
    names = fixes_for(subject.package, overlays=SWITCHED)
    results = plan_tree(str(subject.root), subject.package, names).results
    plans = {result.name: plan_in_words(result, subject.root) for result in results}
    applied = [result.name for result in results if result.outcome is Outcome.APPLIES and result.name in FIXES]
    if before.get("version") == subject.version and before["shown"].keys() >= {*applied}:
        return {**before, "plans": plans}
    print(f"{subject.name}: {subject.version}: {len(applied)} fixes apply", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(2) as pool:
        shown = dict(zip(applied, pool.map(partial(in_words, root=subject.root), applied), strict=True))
    today = datetime.date.today().isoformat()
    return {"version": subject.version, "date": today, "plans": plans, "shown": shown}


def plan_in_words(result: FixResult, root: Path) -> str:
    """Describe a plan: its outcome, the reason for a mismatch, and what its edits found in which modules."""
    reason = result.reason.replace(f"{root}{os.sep}", "")
    return " ".join(filter(None, [result.outcome.value, *(("-", reason) if reason else ()), *detail(result)]))


def detail(result: FixResult) -> Iterator[str]:
    if result.found:
        yield f"({', '.join(['/'.join(result.found), *result.modules])})"


def in_words(fix: str, root: Path) -> str:
    """The result of a fix's demonstration: `works`, or how it breaks the fixes' contract."""
    try:
        without, with_it = (demonstrate_on(root, fix, delivery) for delivery in ("none", "hook"))
    except DemonstrationFailed as error:
        return f"could not run: {str(error).strip().splitlines()[-1]}"
    if not without.bug:
        return f"no bug without the fix: {without.found}"
    return WORKS if not with_it.bug else f"the bug shows with the fix: {with_it.found}"


# Differences from the record


def report(title: str, before: Seen, now: Seen) -> list[str]:
    """List items for what is new or differs; empty without changes."""
    if not before:
        missing = [f"- `{f}`, {title}: {w}" for f, w in sorted(now["plans"].items()) if outcome_of(w) == NO_MATCH]
        return [f"- {title} {now['version']}: first look: {count(now)}", *missing, *odd(title, {}, now)]
    version = f"{before['version']} -> {now['version']}" if before["version"] != now["version"] else now["version"]
    found = [*planned(title, before, now), *odd(title, before, now)]
    return [f"- {title}: {version}"] * (found != [] or before["version"] != now["version"]) + found


def count(now: Seen) -> str:
    outcomes = [outcome_of(words) for words in now["plans"].values()]
    return ", ".join(f"{outcomes.count(one)} {one}" for one in WORDS if one in outcomes)


def outcome_of(words: str) -> str:
    return next((one for one in WORDS if words.startswith(one)), words)


def planned(title: str, before: Seen, now: Seen) -> Iterator[str]:
    """A line for each fix whose plan changed; if the outcome is the same, the code has moved."""
    for fix, words in sorted(now["plans"].items()):
        earlier = before["plans"].get(fix)
        if words != earlier:
            outcome = outcome_of(words)
            moved = earlier is not None and outcome_of(earlier) == outcome != NO_MATCH
            yield f"- `{fix}`, {title}: {'moved' if moved else WORDS.get(outcome, outcome)}: {earlier} -> {words}"


def odd(title: str, before: Seen, now: Seen) -> Iterator[str]:
    """A line for each fix whose demonstration differs from the record or, without a record, does not work."""
    for fix, words in sorted(now["shown"].items()):
        if words != before.get("shown", {}).get(fix, WORKS):
            yield f"- `{fix}`, {title}: {words}"


def section(record: Mapping[str, Seen]) -> str:
    """The section of docs/compatibility.md: a line for each subject, then what does not work there."""
    lines = [[f"{title} {now['version']}", now["date"], works(now), idle(now)] for title, now in record.items()]
    missing = [f"- {line.removeprefix('- ')}" for title, now in record.items() for line in report(title, {}, now)[1:]]
    return "\n".join([generated.table(("what", "date", "works", "other"), lines), *(["", *missing] if missing else [])])


def works(now: Seen) -> str:
    return f"{[*now['shown'].values()].count(WORKS)} fixes"


def idle(now: Seen) -> str:
    outcomes = [outcome_of(words) for words in now["plans"].values()]
    return "; ".join(
        f"{WORDS[one]}: {outcomes.count(one)}" for one in WORDS if one in outcomes and WORDS[one] != "matched"
    )


if __name__ == "__main__":
    sys.exit(main())
