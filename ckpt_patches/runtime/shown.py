"""Format values of a checkpoint for messages, with bounded length and depth."""

import reprlib
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxtuple, _SHORT.maxlist, _SHORT.maxdict = 3, 6, 6, 6
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 100


def shown(value: Any) -> str:
    """A value's repr, cut to 200 characters. The number of parts is limited before they are formatted."""
    if type(value) is str and len(value) < 50 and value.isprintable() and value.isascii():
        return repr(value)  # the same as below, ten times as fast, for thousands of keys and names
    try:
        return _SHORT.repr(value)[:200]
    except Exception as error:  # a value that a file has built can fail in any way
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
