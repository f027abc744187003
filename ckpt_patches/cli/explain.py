"""`ckpt-patches explain`: a page of the documentation in the terminal, or the pages that answer a text."""

import argparse
import io
import json
import os
import re
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path

from ckpt_patches.engine.fix import every_fix
from ckpt_patches.engine.format_patch import page, pages
from ckpt_patches.errors import UserError, unknown
from ckpt_patches.runtime import terminal
from ckpt_patches.runtime.commands import note
from ckpt_patches.runtime.shown import shortened
from ckpt_patches.runtime.units import in_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ckpt_patches.cli.symptoms import Answer

WIDEST = 100  # columns of a paragraph; longer lines are hard to read
LOG = 1 << 22  # bytes of a log's end that are read: a job's error is near it
LONGEST_NAME = 60  # characters of a text in an error
SCHEMA = 1  # of the JSON
COMMANDS = {
    "to_universal": "ds_to_universal",
    "repair": "audit",
    "compare": "fingerprint",
    "apply": "container",
    "revert": "container",
    "diff": "patches",
}  # by a command's name, its page where that has another name


class NoAnswer(UserError):
    """No page answers a text."""

    status = 1


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    text = " ".join(options.text)
    name = name_of(text)
    if not options.json and (not text or name):
        print(as_page(name).rstrip() if name else overview())
        return 0
    found = answers(text if name else _pasted(text))
    document = {"schema": SCHEMA, "answers": [asdict(answer) for answer in found]}
    print(json.dumps(document, indent=1) if options.json else as_text(found))
    return 0


def _pasted(text: str) -> str:
    """The text itself, or what it names: the end of a log, or of standard input (-)."""
    if text == "-":
        if sys.stdin is None:
            raise UserError("expected a text on standard input, found it closed")
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        return sys.stdin.read()[-LOG:]
    if os.path.isfile(text):
        return end_of_log(Path(text))
    if re.fullmatch(r"\S+\.(?:log|txt|out|err)", text):
        raise UserError(f"{text}: No such file or directory")
    return text


def names() -> list[str]:
    """The names of the installed pages: of fixes, and of topics such as audit and migrate."""
    return sorted(pages())


def overview() -> str:
    """The topics with their titles."""
    topics = [(name, _title(name)) for name in names() if name not in every_fix()]
    lines = terminal.table(topics, terminal.width(), wrapped=(1,))
    return "\n".join([*lines, "", "Each fix has a page, too: ckpt-patches list --all has their names."])


def _title(name: str) -> str:
    return page(name).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def name_of(text: str) -> str:
    """The page of this name, of a command, or of a file docs/FOLDER/NAME.md; empty if there is none."""
    name = re.sub(r"^(?:docs/)?(?:\w+/)?|\.md$", "", text.strip().lower()).replace("-", "_")
    name = COMMANDS.get(name, name)
    return name if name in names() else ""


def answers(text: str) -> "list[Answer]":
    """The pages that answer an error text, an effect, a question or the name of a finding, the best first.

    Raises:
        NoAnswer: there is none.
    """
    from ckpt_patches.cli import symptoms

    if name := name_of(text):
        return [symptoms.Answer(name, _title(name), name)]
    if found := symptoms.search(text):
        return found
    asked = shortened(" ".join(text.split()), LONGEST_NAME)
    raise NoAnswer(unknown("page has these words:", asked, names(), "ckpt-patches explain"))


def as_text(found: "list[Answer]") -> str:
    """A line for each answer and one for what matches, and how to read on."""
    rows = [row for answer in found for row in ((answer.name, answer.why), ("", answer.matched)) if row[1]]
    lines = terminal.table(rows, terminal.width(), wrapped=(1,))
    return "\n".join([*lines, "", f"ckpt-patches explain {found[0].page} prints its page"])


def end_of_log(path: Path) -> str:
    """The last LOG bytes of a text file.

    Raises:
        UserError: the file is no text, or cannot be read.
    """
    if not path.is_file():
        raise UserError(f"{path}: expected a log, found no regular file")
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size > LOG:
            note("ckpt-patches", f"{path}: its last {in_bytes(LOG)} are searched, of {in_bytes(size)}")
        file.seek(max(0, size - LOG))
        found = file.read(LOG)
    if b"\0" in found:
        raise UserError(f"{path}: expected a log, found a binary file; ckpt-patches audit judges checkpoints")
    return found.decode(errors="replace")


def as_page(name: str) -> str:
    """A page, without links; formatted if standard output is a terminal."""
    markdown = without_links(page(name).read_text(encoding="utf-8"))
    columns = terminal.width()
    return formatted(markdown, min(columns, WIDEST)) if columns else markdown


def without_links(markdown: str) -> str:
    """Replace links by their texts, with the address for another site; remove comments."""
    markdown = re.sub(r"(?m)^<!--.*?-->\n", "", markdown)
    markdown = re.sub(r"\[([^]]+)\]\((https?://[^)\s]+)\)", r"\1 (\2)", markdown)
    return re.sub(r"\[([^]]+)\]\([^)\s]+\)", r"\1", markdown)


# What is shown as it is, a table, and one heading, item or paragraph; all begin at the left.
BLOCK = re.compile(
    r"^```(?:.|\n)*?^```$|^\|.*(?:\n\|.*)*|^#+ .*|^\S.*(?:\n(?![-*] |\d+\. |```|#+ |\||$).*)*", re.MULTILINE
)


def formatted(markdown: str, columns: int) -> str:
    """Format headings in bold with a blank line below, and wrap paragraphs, items and cells; keep code."""
    return BLOCK.sub(lambda block: _formatted(block[0], columns), re.sub(r"(?m)^(#+ .*\n)(?!\n)", r"\1\n", markdown))


def _formatted(block: str, columns: int) -> str:
    if block.startswith("```"):
        return block
    if block.startswith("#"):
        return terminal.paint(textwrap.fill(block.lstrip("# "), columns), "bold")
    if block.startswith("|"):
        return _table(block, columns)
    marker = re.match(r"[-*] |\d+\. |", block)
    indent = " " * len(marker[0]) if marker else ""
    filler = textwrap.TextWrapper(columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return filler.fill(" ".join(block.split()))


def _table(text: str, columns: int) -> str:
    """A Markdown table with aligned cells, wrapped."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines()]
    cells = [[cell.strip().replace("\\|", "|") for cell in line] for line in lines]
    rows = [row for row in cells if not all(re.fullmatch(r":?-+:?", cell) for cell in row)]
    if len({len(row) for row in rows}) > 1:
        return text
    return "\n".join(terminal.table(rows, columns, wrapped=range(len(rows[0]))))
