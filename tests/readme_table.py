"""Write README.md's table of bugs, from the fixes themselves: `python tests/readme_table.py`."""

from ckpt_patches.engine.fix_table import render
from ckpt_patches.formats.durable import replace_durably
from upstream import REPOSITORY

if __name__ == "__main__":
    page = REPOSITORY / "README.md"
    replace_durably(page, render(page.read_text(encoding="utf-8")).encode())
