"""Compare an edited function with what is in its place now: other packages replace methods at run time."""

import gc
import os
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

MOST = 200  # objects that are searched for ours


class Change(NamedTuple):
    """An edited function that was replaced or wrapped."""

    text: str  # the function, and the new one's module, file and line
    wraps: bool  # the new function holds ours, such as in `__wrapped__` or its closure: it may call it


def change(module: object, name: str, function: str, left: object) -> Change | None:
    """How a function of the module with this name differs from the one that was left there; None if it does not."""
    now = found(module, function)
    if now is left:
        return None
    own = [part for part in _inside(left) if part is left or getattr(part, "__globals__", None) is namespace(module)]
    holds = any(part is mine for part in _inside(now) for mine in own)
    return Change(f"{name}.{function} {'is wrapped' if holds else 'was replaced'} by {_who(now)}", holds)


def found(module: object, function: str) -> Any:
    """The attribute `name` or `Class.name` of a module, its own or inherited; None if it does not exist."""
    place: Any = module
    for part in function.split("."):
        owners = place.__mro__ if issubclass(type(place), type) else (place,)
        place = next((namespace(owner)[part] for owner in owners if part in namespace(owner)), None)
    return place


def namespace(owner: object) -> Mapping[str, Any]:
    """The attributes of a module or class, without running code of it: some modules load themselves when touched."""
    try:
        names: Mapping[str, Any] = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return names


def _inside(thing: object) -> Iterator[object]:
    """An object and what it holds, nearest first, but no classes, modules and global variables."""
    waiting, seen = [thing], set[int]()
    while waiting and len(seen) < MOST:
        part = waiting.pop(0)
        is_global = issubclass(type(part), type | ModuleType) or (type(part) is dict and "__builtins__" in part)
        if id(part) not in seen and not is_global:
            seen.add(id(part))
            yield part
            waiting += gc.get_referents(part)


def _who(now: object) -> str:
    """The origin of a replacement: its module, file and line."""
    if now is None:
        return "nothing: it was deleted"
    for part in _inside(now):
        if isinstance(part, FunctionType):
            code = part.__code__
            return f"{part.__module__} ({os.path.abspath(code.co_filename)}:{code.co_firstlineno})"
    return f"{type(now).__module__} ({type(now).__name__})"
