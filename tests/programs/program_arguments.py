"""A program's command line, from the names and defaults of its arguments."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any


def parsed(positional: Mapping[str, Callable[[str], Any]], **options: Any) -> argparse.Namespace:
    """Parse positional arguments by their types, and options by their defaults.

    A type in place of a default makes an option of that type, which is None if not given. False makes a flag. A list is
    given with commas.
    """
    parser = argparse.ArgumentParser()
    for name, kind in positional.items():
        parser.add_argument(name, type=kind)
    for name, default in options.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, type):
            parser.add_argument(flag, type=default)
        elif isinstance(default, list):
            parser.add_argument(flag, type=_list_of(type(default[0])), default=default)
        else:
            parser.add_argument(flag, type=type(default), default=default)
    return parser.parse_args()


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",")]
