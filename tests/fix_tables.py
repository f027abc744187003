"""Write the tables of fixes in README.md and docs/README.md: `python tests/fix_tables.py`."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from ckpt_patches.engine.fix import load, sentence
from ckpt_patches.engine.fix_table import HEADS, groups
from ckpt_patches.engine.registry import FIXES
from ckpt_patches.runtime.durable import replace_durably
from upstream import REPOSITORY

BEGIN, END = "<!-- fixes: begin -->", "<!-- fixes: end -->"


def bugs() -> str:
    """What users see, and the fix: for README.md."""
    tables = []
    for title, rows in groups(map(load, FIXES)):
        linked = [(*cells, f"[`{name}`](docs/{name}.md)") for *cells, name in rows]
        tables.append(f"**{title}**\n\n{_table(HEADS, linked)}")
    return "\n\n".join(tables)


def index() -> str:
    """A link to each page, and what the fix does: for docs/README.md."""
    return _table(("Fix", "Change"), [(f"[{name}]({name}.md)", sentence(name)) for name in FIXES])


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [_line(heads), "|---" * len(tuple(heads)) + "|", *map(_line, rows)]
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


PAGES: dict[Path, Callable[[], str]] = {REPOSITORY / "README.md": bugs, REPOSITORY / "docs" / "README.md": index}


def render(page: str, table: str) -> str:
    """A page with the table between its two markers.

    Raises:
        ValueError: the page does not have both markers, once each and in order.
    """
    text, count = re.subn(f"(?s)(?<={BEGIN}\n).*?(?={END})", lambda _: f"{table}\n", page)
    if count != 1:
        raise ValueError(f"expected one {BEGIN} and, on a later line, {END}; found {count} pairs")
    return text


def main() -> None:
    for path, table in PAGES.items():
        replace_durably(path, render(path.read_text(encoding="utf-8"), table()).encode())


if __name__ == "__main__":
    main()
