"""Write the tables of fixes in README.md and docs/README.md: `python tests/fix_tables.py`."""

from collections.abc import Callable
from pathlib import Path

import generated
from ckpt_patches.engine.fix import load, sentence
from ckpt_patches.engine.fix_table import HEADS, groups
from ckpt_patches.engine.registry import FIXES
from upstream import REPOSITORY

BLOCK = "fixes"


def silent_bugs() -> str:
    """What users see of the silent ones, and the fix: for README.md, whose length is bounded."""
    ((title, rows), *others) = groups(map(load, FIXES))
    linked = [(*cells, f"[`{name}`](docs/{name}.md)") for *cells, name in rows]
    more = "; ".join(other for other, _ in others)
    return f"**{title}**\n\n{generated.table(HEADS, linked)}\n\n**{more}**: [all bugs](docs/README.md#bugs)"


def index() -> str:
    """A link to each page, what users see, and what the fix does: for docs/README.md."""
    rows = [(f"[{name}]({name}.md)", load(name).symptom, sentence(name)) for name in FIXES]
    return generated.table(("Fix", "Symptom", "Change"), rows)


PAGES: dict[Path, Callable[[], str]] = {REPOSITORY / "README.md": silent_bugs, REPOSITORY / "docs" / "README.md": index}


def main() -> None:
    for path, text in PAGES.items():
        generated.write(path, {BLOCK: text()})


if __name__ == "__main__":
    main()
