"""Write the table of writers in docs/fsdp.md from their record: `python tests/writers/page.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import generated
from upstream import REPOSITORY
from writers import record

PAGE, BLOCK = REPOSITORY / "docs" / "fsdp.md", "writers"
HEADS = ("written by", "saves", "as saved", "with a NaN; without a file")


def section() -> str:
    return generated.table(HEADS, [cells(name, found) for name, found in record.read().items()])


def cells(name: str, found: record.Found) -> list[str]:
    by_format: dict[str, list[str]] = {}
    for case, own in found["cases"].items():
        by_format.setdefault(own["format"], []).append(case)
    every = found["cases"].values()
    verdicts = [{own[change].partition(":")[0] for own in every} for change in record.CHANGES]
    return [
        f"{name} {found['on'][name]}",
        "; ".join(f"{', '.join(cases)}: {called}" for called, cases in by_format.items()),
        ", ".join(sorted({own["as saved"] for own in every})),
        "; ".join(", ".join(sorted(words)) for words in verdicts),
    ]


if __name__ == "__main__":
    generated.write(PAGE, {BLOCK: section()})
