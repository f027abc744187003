"""Write the tables of fixes in README.md and docs/README.md: `python tests/fix_tables.py`."""

from collections.abc import Callable
from pathlib import Path

import generated
from ckpt_patches.engine.fix import load, sentence
from ckpt_patches.engine.fix_table import HEADS, groups
from ckpt_patches.engine.registry import FIXES
from upstream import REPOSITORY

BLOCK = "fixes"


def bugs() -> str:
    """What users see, and the fix: for README.md."""
    tables = []
    for title, rows in groups(map(load, FIXES)):
        linked = [(*cells, f"[`{name}`](docs/{name}.md)") for *cells, name in rows]
        tables.append(f"**{title}**\n\n{generated.table(HEADS, linked)}")
    return "\n\n".join(tables)


def index() -> str:
    """A link to each page, and what the fix does: for docs/README.md."""
    return generated.table(("Fix", "Change"), [(f"[{name}]({name}.md)", sentence(name)) for name in FIXES])


PAGES: dict[Path, Callable[[], str]] = {REPOSITORY / "README.md": bugs, REPOSITORY / "docs" / "README.md": index}


def main() -> None:
    for path, text in PAGES.items():
        generated.write(path, {BLOCK: text()})


if __name__ == "__main__":
    main()
