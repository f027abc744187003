"""Stubs for missing modules that `megatron.training` imports, but that saves and loads do not use."""

import importlib.util
import sys
import types
import typing
from typing import Any

MODULES = ("yaml",)


class Stub(types.ModuleType):
    """A module that has every attribute; each is a callable instance of a new class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": _nothing, "__call__": _nothing})()


def _nothing(*_: object, **__: object) -> None:
    """Accept any arguments."""


def install() -> None:
    if not hasattr(typing, "override"):  # before Python 3.12
        vars(typing)["override"] = lambda function: function
    for name in MODULES:
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            sys.modules[name] = Stub(name)
