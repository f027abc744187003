"""What `megatron.training` imports and saves and loads do not use, where it is absent."""

import importlib.util
import sys
import types
import typing
from typing import Any

MODULES = ("yaml",)


class StandIn(types.ModuleType):
    """A module with any name in it, of a class that can be derived from, made and called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": _nothing, "__call__": _nothing})()


def _nothing(*_: object, **__: object) -> None:
    """Take anything."""


def install() -> None:
    if not hasattr(typing, "override"):  # before Python 3.12
        vars(typing)["override"] = lambda function: function
    for name in MODULES:
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            sys.modules[name] = StandIn(name)
