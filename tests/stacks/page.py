"""The section of docs/compatibility.md about stacks. The record of the stacks supplies one line per row."""

import generated
from stacks import record
from stacks.record import Found
from stacks.rows import ROWS, Row

HEADS = ("stack", "installed, date", "works", "other")
NOT_RUN = "not run"
NOTHING_TO_DO = ("fixed upstream", "not present")
WORKS = "works"
KINDS = ("right", "loud", "SILENT", "not trained")
FLATTENED = "megatron: migrate"
LIMITS = "limits.md#stacks"  # this page explains the exceptions


def section() -> str:
    found = record.read()
    rows = [cells(row, found.get(row.name, {})) for row in ROWS]
    return "\n".join([generated.table(HEADS, rows), "", *notes()])


def notes() -> list[str]:
    """The differences between rows and the pins of their consumers, with the rows of each difference."""
    rows: dict[str, list[str]] = {}
    for row in ROWS:
        for note in filter(None, row.note.split("; ")):
            rows.setdefault(note, []).append(row.title)
    return [f"- {', '.join(titles)}: {note}." for note, titles in rows.items()]


def cells(row: Row, found: Found) -> list[str]:
    """A row's line: the installed packages, the number of fixes per result, and the results of tools and explorer."""
    if "fixes" not in found:
        return [row.title, row.contents, "", f"{NOT_RUN}{': ' if found else ''}{found.get(NOT_RUN, '')}"]
    fixes: dict[str, str] = found["fixes"]
    count = {word: len(names.split()) for word, names in fixes.items()}
    failed = ", ".join(f"`{name}`" for name in exceptions(found))
    of_tools = {**found["tools"], **({FLATTENED: found["flattened"]} if "flattened" in found else {})}
    tools = [name for name, result in of_tools.items() if result == WORKS]
    idle = [f"{word}: {count[word]}" for word in NOTHING_TO_DO if word in count]
    broken = [f"{name}: {result}" for name, result in of_tools.items() if result != WORKS]
    drawn = {kind: sum(of_package[kind] for of_package in found["explorer"].values()) for kind in KINDS}
    explored = f"explorer: {drawn['right']} right, {drawn['loud']} loud"
    unproven = [f"explorer: {drawn[kind]} {kind.lower()}" for kind in KINDS[2:] if drawn[kind]]
    works = [f"{count.get(WORKS, 0)} fixes", *dict.fromkeys(name.partition(": ")[2] for name in tools), explored]
    other = [*idle, *([f"[exceptions]({LIMITS}): {failed}"] if failed else []), *broken, *unproven]
    return [row.title, f"{installed(row, found)}; {found['date']}", "; ".join(works), "; ".join(other)]


def installed(row: Row, found: Found) -> str:
    names = {"numpy": "NumPy", "deepspeed": "DeepSpeed", "nvidia-resiliency-ext": "NVRx"}
    on = {names.get(name, name): version for name, version in found["on"].items()}
    commits = {"megatron-core": row.commit}
    return ", ".join(commits.get(name) or f"{name} {version}" for name, version in on.items())


def exceptions(found: Found) -> list[str]:
    """The fixes that behave differently in a row than they state."""
    words: dict[str, str] = found.get("fixes", {})
    return sorted(
        name for word, names in words.items() if word not in (WORKS, *NOTHING_TO_DO) for name in names.split()
    )
