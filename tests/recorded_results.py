"""Test results on upstream's releases, as in tests/recorded: equal results of several releases are stored once.

A file is JSON: for each test, with `*` for the release in its parameters, the recorded rows, each with the releases
that gave it. Each row is a line, and the lines are sorted, so that diffs are readable.

    {
    "tests/test_a.py::test_resume[*-hook]": [
    {"format": "torch", "result": "bit-equal", "releases": "0.12.0 0.12.1 0.13.0"},
    {"format": "torch", "result": "differs by 0.1", "releases": "0.14.0"}
    ]
    }

Releases are listed, not given as ranges: a range would include a release that is added in between later.
"""

import fcntl
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Record = Mapping[str, Iterable[Mapping[str, Any]]]  # by test name with parameters
VERSION, RELEASES = "version", "releases"
EN_DASH = "\N{EN DASH}"
ANY = "*"  # in place of the release in a test's parameters


def read(path: Path) -> dict[str, list[Row]]:
    """The rows of each test, each with its "version", sorted by test; empty without a file."""
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found: dict[str, list[Row]] = {}
    for test, rows in stored.items():
        for row in rows:
            result = {name: value for name, value in row.items() if name != RELEASES}
            for version in row[RELEASES].split():
                found.setdefault(test.replace(ANY, version), []).append({**result, VERSION: version})
    return dict(sorted(found.items()))


def write(path: Path, record: Record) -> None:
    """Store the rows of all tests; each row needs a "version".

    Raises:
        ValueError: a test's parameters do not name the release, or contain `*`.
    """
    releases: dict[str, dict[str, list[str]]] = {}
    for test, rows in record.items():
        for row in rows:
            general = _for_any_release(test, row[VERSION])
            result = json.dumps({name: row[name] for name in sorted(row) if name != VERSION})
            releases.setdefault(general, {}).setdefault(result, []).append(row[VERSION])
    tests = [f"{json.dumps(test)}: [\n{_lines(releases[test])}\n]" for test in sorted(releases)]
    path.parent.mkdir(exist_ok=True)
    path.write_text("{\n" + ",\n".join(tests) + "\n}\n", encoding="utf-8")


def add(path: Path, record: Record) -> None:
    """Replace the rows of these tests from earlier runs, and keep those of other tests."""
    if not record:
        return
    path.parent.mkdir(exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the processes of a parallel run end at about the same time
        write(path, {**read(path), **record})


def ranges(versions: Iterable[str], known: Sequence[str]) -> str:
    """Releases as text; consecutive ones are a range from the first to the last.

    Args:
        versions: some of `known`.
        known: all releases of a package, oldest first; a range contains each of them between its ends.
    """
    chosen = set(versions)
    runs: list[list[str]] = []
    for before, version in zip(("", *known), known, strict=False):
        if version in chosen:
            runs.append([version]) if before not in chosen else runs[-1].append(version)
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]}{EN_DASH}{run[-1]}" for run in runs)


def _for_any_release(test: str, version: str) -> str:
    name, bracket, parameters = test.partition("[")
    general = name + bracket + parameters.replace(version, ANY)
    if ANY in test or general.replace(ANY, version) != test or general == test:
        raise ValueError(f"{test}: expected the release {version} in its parameters, and no {ANY}")
    return general


def _lines(releases: Mapping[str, list[str]]) -> str:
    """A line for each result, as JSON, with the releases that gave it."""
    return ",\n".join(
        f"{result[:-1]}, {json.dumps(RELEASES)}: {json.dumps(' '.join(sorted(releases[result], key=_numbers)))}}}"
        for result in sorted(releases)
    )


def _numbers(version: str) -> list[int]:
    """The numbers of a release, as a sort key; empty for a main branch."""
    return [int(number) for number in re.findall(r"\d+", version)]
