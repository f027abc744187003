"""The commands' output: how much of it, tables, wrapped to the width of the terminal, and colors."""

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TextIO

from ckpt_patches.errors import UserError

QUIET, VERBOSE = ("-q", "--quiet"), ("-v", "--verbose")  # whole words: an error message can begin with one
WHEN = ("auto", "always", "never")
COLORS = {"bold": 1, "red": 31, "green": 32, "yellow": 33}
GAP = 2  # columns between two cells
NARROWEST = 14  # minimum columns of a wrapped cell


class Output:
    """The options that every command has."""

    quiet = False  # no progress, and no line that is neither a result nor an error
    verbose = False  # a traceback before an error's line
    color = WHEN[0]


def take_options(arguments: Sequence[str]) -> list[str]:
    """Set `Output` from the options of every command, and return the other arguments.

    Raises:
        UserError: --color has no value, or another one than those in WHEN.
    """
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    own = arguments[:end]
    Output.quiet, Output.verbose = (any(word in names for word in own) for names in (QUIET, VERBOSE))
    Output.color = WHEN[0]
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    common.add_argument("--color", choices=WHEN)
    try:
        _, left = common.parse_known_args([word for word in own if word not in (*QUIET, *VERBOSE)], Output)
    except argparse.ArgumentError as error:
        raise UserError(str(error)) from None
    return [*left, *arguments[end:]]


def width() -> int:
    """The columns of the terminal, or COLUMNS; 0 if lines may have any length, as in a file."""
    return shutil.get_terminal_size().columns if _is_terminal() or os.environ.get("COLUMNS") else 0


def filled(text: str, stream: TextIO | None = None) -> str:
    """A text whose lines are wrapped between words at the terminal's width; as it is if the stream is no terminal.

    `stream`: where it is printed, by default standard output.
    """
    if not _is_terminal(stream):
        return text
    filler = textwrap.TextWrapper(
        shutil.get_terminal_size().columns,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(map(filler.fill, text.split("\n")))


def paint(text: str, color: str) -> str:
    """Text in one of `COLORS`: by --color or, without it, on a terminal with colors if NO_COLOR is not set."""
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb" or not _is_terminal()
    plain = plain if Output.color == "auto" else Output.color == "never"
    return text if plain or not color else f"\x1b[{COLORS[color]}m{text}\x1b[0m"


def _is_terminal(stream: TextIO | None = None) -> bool:
    stream = stream or sys.stdout
    return stream is not None and stream.isatty()


def table(
    rows: Sequence[Sequence[str]],
    columns: int = 0,
    wrapped: Collection[int] = (),
    colors: Mapping[str, str] | None = None,
) -> list[str]:
    """Lines of a table.

    Args:
        rows: of cells.
        columns: the maximum width; 0: no limit.
        wrapped: the indices of the columns whose cells may be wrapped for that.
        colors: by the text of a cell, its color.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    excess = sum(widths) + GAP * (len(widths) - 1) - columns if columns else 0
    for _ in range(excess):
        widest = max(wrapped, key=lambda i: widths[i], default=-1)
        if widest < 0 or widths[widest] <= NARROWEST:
            break
        widths[widest] -= 1
    return [line for cells in rows for line in _lines(cells, widths, colors or {})]


def _lines(cells: Sequence[str], widths: Sequence[int], colors: Mapping[str, str]) -> Iterator[str]:
    parts = [
        textwrap.wrap(cell, max(columns, 1), break_on_hyphens=False)
        for cell, columns in zip(cells, widths, strict=True)
    ]
    for line in zip_longest(*(part or [""] for part in parts), fillvalue=""):
        padded = (
            paint(text, colors.get(text, "")) + " " * (n - len(text)) for text, n in zip(line, widths, strict=True)
        )
        yield (" " * GAP).join(padded).rstrip()
