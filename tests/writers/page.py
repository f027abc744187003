"""The table of writers, from their record: a line for each save."""

import generated
from writers import record

HEADS = ("written by", "format", "as saved", "with a NaN; without a file")


def section() -> str:
    return generated.table(
        HEADS, [cells(name, found, case) for name, found in record.read().items() for case in found["cases"]]
    )


def cells(name: str, found: record.Found, case: str) -> list[str]:
    own = found["cases"][case]
    title = f"{name} {found['on'][name]}, {case}"
    return [
        title,
        own["format"],
        own["as saved"],
        "; ".join(own[change].partition(":")[0] for change in record.CHANGES),
    ]
