"""The table of bugs: what a user sees, which releases and stacks have it, and the fix. Silent bugs come first."""

import re
from collections.abc import Iterable, Sequence

from ckpt_patches.engine.fix import Fix, load
from ckpt_patches.engine.registry import CORE, FIXES

HEADS = ("symptom", "releases", "stacks", "fix")
SILENT = "Silent: wrong state without an error"
VISIBLE = "Visible: an error, a hang or high memory use"
BEGIN, END = "<!-- fixes: begin -->", "<!-- fixes: end -->"

Row = tuple[str, str, str, str]


def groups(fixes: Iterable[Fix]) -> list[tuple[str, list[Row]]]:
    """The heading and the rows of each group that is not empty."""
    every = list(fixes)
    found = [
        (title, [row(f) for f in every if f.silent is silent]) for title, silent in ((SILENT, True), (VISIBLE, False))
    ]
    return [(title, rows) for title, rows in found if rows]


def row(fix: Fix) -> Row:
    title = "megatron-core" if fix.package == CORE else "DeepSpeed"
    ranges = ", ".join(f"{first} \N{EN DASH} {last}" for first, last in fix.releases)
    return fix.symptom, f"{title} {ranges}", fix.stacks, fix.name


def markdown() -> str:
    """The table of all fixes, for a page beside docs/."""
    return "\n\n".join(_markdown(title, rows) for title, rows in groups(map(load, FIXES)))


def _markdown(title: str, rows: Sequence[Row]) -> str:
    lines = [f"**{title}**", "", _line(HEADS), "|---" * len(HEADS) + "|"]
    return "\n".join([*lines, *(_line((*cells, f"[`{name}`](docs/{name}.md)")) for *cells, name in rows)])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def render(page: str) -> str:
    """A page with the current table between its two markers.

    Raises:
        ValueError: the page does not have both markers, once each and in order.
    """
    text, count = re.subn(f"(?s)(?<={BEGIN}\n).*?(?={END})", lambda _: f"{markdown()}\n", page)
    if count != 1:
        raise ValueError(f"expected one {BEGIN} and, on a later line, {END}; found {count} pairs")
    return text
