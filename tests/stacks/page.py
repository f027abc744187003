"""The section of docs/compatibility.md about stacks, from their record: a line for each row, then its exceptions."""

import generated
from stacks import record
from stacks.record import Found
from stacks.rows import ROWS, Row

HEADS = ("stack", "installed, date", "works", "other")
NOT_RUN = "not run"
NOTHING_TO_DO = ("fixed upstream", "not present")
WORKS = "works"


def section() -> str:
    found = record.read()
    rows = [cells(row, found.get(row.name, {})) for row in ROWS]
    notes = [f"- {row.title}: {row.note}." for row in ROWS if row.note]
    return "\n".join([generated.table(HEADS, rows), "", *notes, *exceptions(found)])


def cells(row: Row, found: Found) -> list[str]:
    """A row's line: what is installed, the number of fixes by what they do, and what the tools and the explorer did."""
    if "fixes" not in found:
        return [row.title, row.contents, "", f"{NOT_RUN}{': ' if found else ''}{found.get(NOT_RUN, '')}"]
    fixes: dict[str, str] = found["fixes"]
    count = {word: len(names.split()) for word, names in fixes.items()}
    failed = sum(number for word, number in count.items() if word not in (WORKS, *NOTHING_TO_DO))
    tools = [name for name, result in found["tools"].items() if result == WORKS]
    idle = [f"{word}: {count[word]}" for word in NOTHING_TO_DO if word in count]
    broken = [f"{name}: {result}" for name, result in found["tools"].items() if result != WORKS]
    explored = [f"explorer: {drawn['right']} right, {drawn['loud']} loud" for drawn in found["explorer"].values()]
    silent = [f"explorer: {drawn['SILENT']} silent" for drawn in found["explorer"].values() if drawn["SILENT"]]
    works = [f"{count.get(WORKS, 0)} fixes", *(name.partition(": ")[2] for name in tools), *explored]
    other = [*idle, *([f"see below: {failed}"] if failed else []), *broken, *silent]
    return [row.title, f"{installed(found)}; {found['date']}", "; ".join(works), "; ".join(other)]


def installed(found: Found) -> str:
    names = {"numpy": "NumPy", "deepspeed": "DeepSpeed", "nvidia-resiliency-ext": "NVRx"}
    return ", ".join(f"{names.get(name, name)} {version}" for name, version in found["on"].items())


def exceptions(found: dict[str, Found]) -> list[str]:
    """What is not as the fix states it: the fix, what came of it, and the rows."""
    rows: dict[tuple[str, str], list[str]] = {}
    for row in ROWS:
        for word, names in found.get(row.name, {}).get("fixes", {}).items():
            if word not in (WORKS, *NOTHING_TO_DO):
                for name in names.split():
                    rows.setdefault((name, word), []).append(row.title)
    return [f"- `{name}`, {', '.join(titles)}: {word}" for (name, word), titles in sorted(rows.items())]
