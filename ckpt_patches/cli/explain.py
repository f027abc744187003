"""`ckpt-patches explain NAME`: a page of the documentation in the terminal."""

import re
import textwrap
from pathlib import Path

from ckpt_patches.engine.fix import every_fix, sentence
from ckpt_patches.engine.format_patch import page
from ckpt_patches.errors import UserError, unknown
from ckpt_patches.runtime import terminal

WIDEST = 100  # columns of a paragraph; longer lines are hard to read


def names() -> list[str]:
    """The names of the installed pages: of fixes, and of topics such as audit and migrate."""
    return sorted(path.stem for path in _folder().glob("*.md") if path.stem != "README")


def overview() -> str:
    """All pages with their titles: the topics, then the fixes."""
    pages, known = names(), every_fix()
    topics = [(name, _title(name)) for name in pages if name not in known]
    fixes = [(name, sentence(name).removesuffix(".")) for name in pages if name in known]
    columns = terminal.width()
    parts = [("Topics", topics), ("Fixes", fixes)]
    return "\n\n".join(
        "\n".join([terminal.paint(title, "bold"), *terminal.table(rows, columns, wrapped=(1,))])
        for title, rows in parts
    )


def _title(name: str) -> str:
    return (_folder() / f"{name}.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def text(name: str) -> str:
    """A page, without links; formatted if standard output is a terminal.

    Raises:
        UserError: no page has this name.
    """
    if name not in names():
        raise UserError(unknown("page", name, names(), "ckpt-patches explain"))
    markdown = without_links(page(name).read_text(encoding="utf-8"))
    columns = terminal.width()
    return formatted(markdown, min(columns, WIDEST)) if columns else markdown


def _folder() -> Path:
    return page("audit").parent


def without_links(markdown: str) -> str:
    """Replace links by their texts, with the address for another site; remove comments and pictures."""
    markdown = re.sub(r"(?m)^<!--.*?-->\n", "", markdown)
    markdown = re.sub(r"!\[[^]]*\]\([^)\s]+\)\n*", "", markdown)  # a picture
    markdown = re.sub(r"\[([^]]+)\]\((https?://[^)\s]+)\)", r"\1 (\2)", markdown)
    markdown = re.sub(r"\[([^]]+)\]\([^)\s]+\)", r"\1", markdown)
    return re.sub(r"`?\b(?:docs/)?(\w+)\.md\b`?(?:#[\w-]+)?", _as_command, markdown)


def _as_command(page: "re.Match[str]") -> str:
    """The command that prints a page, if it is installed, instead of its file name."""
    return f"`ckpt-patches explain {page[1]}`" if page[1] in names() else page[0]


def formatted(markdown: str, columns: int) -> str:
    """Format headings in bold with a blank line below, and wrap paragraphs and items; keep code and tables."""
    blocks = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(block if block.startswith("```") else _prose(block, columns) for block in blocks)


def _prose(markdown: str, columns: int) -> str:
    markdown = re.sub(r"(?m)^(#+ .*)\n(?!\n)", r"\1\n\n", markdown)
    parts = re.split(r"(\n\n+|\n(?=[-*] |\d+\. ))", markdown)
    return "".join(part if part.isspace() else _part(part, columns) for part in parts)


def _part(text: str, columns: int) -> str:
    if text.startswith("#"):
        return terminal.paint(text.lstrip("# "), "bold")
    if text.startswith(("    ", "|")) or not text.strip():
        return text
    marker = re.match(r"[-*] |\d+\. |", text)
    indent = " " * len(marker[0]) if marker else ""
    end = "\n" if text.endswith("\n") else ""
    return textwrap.fill(" ".join(text.split()), columns, subsequent_indent=indent, break_on_hyphens=False) + end
