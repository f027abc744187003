"""Format values and names of a checkpoint for people, with bounded length and depth."""

import reprlib
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxtuple, _SHORT.maxlist, _SHORT.maxdict = 3, 6, 6, 6
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 100
LONGEST = 5000  # characters of a line; paths are shorter


def shown(value: Any) -> str:
    """A value's repr, cut to 200 characters. The number of parts is limited before they are formatted."""
    if type(value) is str and len(value) < 50 and value.isprintable() and value.isascii():
        return repr(value)  # the same as below, ten times as fast, for thousands of keys and names
    try:
        return _SHORT.repr(value)[:200]
    except Exception as error:  # a value that a file has built can fail in any way
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"


def shortened(text: str, longest: int = LONGEST) -> str:
    """A text of at most this many characters, or its begin and end."""
    half = longest // 2
    return text if len(text) <= longest else f"{text[: longest - half - 1]}…{text[-half:]}"


def printable(text: str) -> str:
    """One line from an untrusted text: other characters can move the cursor or change the direction of text."""
    short = shortened(text)
    if short.isprintable():
        return short
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in short)


def printable_lines(text: str) -> str:
    """The lines of a text, each `printable`."""
    return "\n".join(map(printable, text.split("\n")))
