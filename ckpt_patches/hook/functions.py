"""Check that the functions that fixes have edited still run: other packages replace methods at run time.

The functions that our loader left in a module or class, edited by the hook or in place, are compared with the current
ones. A wrapper that holds ours, through `__wrapped__`, a `functools.partial` or its closure, may call it: the report
names it as a wrapper, not a replacement. The only access to foreign code is reading attributes of replacements.
"""

import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

from ckpt_patches.hook import running

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_patches import Switches

# Entry points of saves and loads. In strict mode these first check for replaced functions.
ENTRANCES = {
    "megatron.core.dist_checkpointing.serialization": ("save", "load"),
    "megatron.core.optimizer.distrib_optimizer": tuple(
        f"DistributedOptimizer.{name}"
        for name in (
            "load_parameter_state",
            "load_state_dict",
            "save_parameter_state",
            "sharded_state_dict",
            "state_dict",
        )
    ),
    "deepspeed.runtime.engine": ("DeepSpeedEngine.save_checkpoint", "DeepSpeedEngine.load_checkpoint"),
}
# Maximum number of objects to search for ours.
DEPTH = 50


@dataclass(frozen=True)
class Change:
    """An edited function that was replaced or wrapped."""

    module: str
    function: str  # `name` or `Class.name`
    by: str  # the new function's module, file and line
    wraps: bool  # the new function holds ours
    fixes: tuple[str, ...]  # that edit it

    def __str__(self) -> str:
        verb = "is wrapped" if self.wraps else "was replaced"
        return f"{self.module}.{self.function} {verb} by {self.by}"


@dataclass(frozen=True)
class _Loaded:
    """A module that our loader has run."""

    module: ModuleType
    spec: Any
    fixes: "Mapping[str, Sequence[str]]"  # by function, the fixes that edit it


# By module, the functions that our loader left in it.
_ours: dict[str, dict[str, Any]] = {}
_loaded: dict[str, _Loaded] = {}


def record(module: ModuleType, name: str, fixes: "Mapping[str, Sequence[str]]") -> None:
    """Record the edited functions of a module whose code has just run; from now on they are checked.

    Args:
        module: the module.
        name: its name in sys.modules.
        fixes: by function, the fixes that edit it.
    """
    if log_replaced not in running.looks:
        running.looks.append(log_replaced)
    _loaded[name] = _Loaded(module, module.__spec__, fixes)
    _ours[name] = {function: _found(module, function) for function in fixes}


def guard(module: ModuleType, name: str, switches: "Switches") -> None:
    """In strict mode, make saves and loads of a module that has just run first check for replaced functions."""
    for function in ENTRANCES.get(name, ()) if switches.mode == "strict" else ():
        owner_name, _, last = function.rpartition(".")
        owner = _found(module, owner_name) if owner_name else module
        entrance = _namespace(owner).get(last)
        if isinstance(entrance, FunctionType) and not hasattr(entrance, "_ckpt_patches_looks"):
            setattr(owner, last, _looking_first(entrance, switches))


def _looking_first(entrance: FunctionType, switches: "Switches") -> FunctionType:
    @functools.wraps(entrance)
    def look_first(*args: Any, **kwargs: Any) -> Any:
        log_replaced(switches)
        return entrance(*args, **kwargs)

    look_first.__dict__["_ckpt_patches_looks"] = True
    assert isinstance(look_first, FunctionType)
    return look_first


def changes() -> list[Change]:
    """The edited functions that were replaced or wrapped."""
    found = []
    for name, loaded in _loaded.items():
        module = loaded.module
        if sys.modules.get(name) is not module or module.__spec__ is not loaded.spec:
            continue
        for function, ours in _ours[name].items():
            now = _found(module, function)
            if now is not ours:
                fixes = tuple(loaded.fixes[function])
                found.append(Change(name, function, _who(module, function, now), _holds(now, ours), fixes))
    return found


def log_replaced(switches: "Switches", *, at_exit: bool = False) -> None:
    """Warn about fixes that do not run because their functions were replaced.

    Raises:
        StrictModeError: in strict mode, there is one; at every call, on every rank.
    """
    from ckpt_patches.hook import log_lines

    replaced = [change for change in changes() if not change.wraps]
    messages = [replacement(fix, replaced) for fix in dict.fromkeys(fix for change in replaced for fix in change.fixes)]
    log_lines.warn_or_raise(messages, switches, at_exit=at_exit)


def replacement(fix: str, replaced: list[Change]) -> str:
    """The message for a fix whose functions were replaced."""
    what = "; ".join(str(change) for change in replaced if fix in change.fixes)
    return (
        f"the fix {fix} is NOT active any more: {what}. The bug may be there: take the replacement out, or let it call "
        f"the function that it replaces, or set CKPT_PATCHES_SKIP={fix} to go on without the fix"
    )


def _found(module: object, function: str) -> Any:
    """The attribute of a module or its class, inherited or its own; None if it does not exist."""
    found: Any = module
    for part in function.split("."):
        owners = found.__mro__ if isinstance(found, type) else (found,)
        found = next((_namespace(owner)[part] for owner in owners if part in _namespace(owner)), None)
    return found


def _namespace(owner: object) -> dict[str, Any]:
    """The own attributes of a module or class, without running its code."""
    try:
        return dict(type.__getattribute__(owner, "__dict__") if isinstance(owner, type) else vars(owner))
    except TypeError:
        return {}


def _holds(now: object, ours: object) -> bool:
    """Whether the current function holds the one that our loader left."""
    wanted = {id(part) for part in _inside(ours)} | {id(ours)}
    return any(id(part) in wanted for part in _inside(now))


def _inside(thing: object) -> Iterator[object]:
    """A function, and the functions that it wraps."""
    waiting, seen = [thing], set[int]()
    while waiting and len(seen) < DEPTH:
        part = waiting.pop(0)
        if id(part) in seen or not (callable(part) or isinstance(part, property | staticmethod | classmethod)):
            continue
        seen.add(id(part))
        yield part
        waiting += _wrapped_in(part)


def _wrapped_in(part: object) -> list[object]:
    if isinstance(part, property):
        return [part.fget, part.fset, part.fdel]
    if isinstance(part, staticmethod | classmethod | MethodType):
        return [part.__func__]
    if isinstance(part, functools.partial | functools.partialmethod):
        return [part.func]
    held = [running.get(part, "__wrapped__")]
    for cell in part.__closure__ or () if isinstance(part, FunctionType) else ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # still empty
            continue
    return [thing for thing in held if not isinstance(thing, type)]


def _who(module: object, function: str, now: object) -> str:
    """The origin of a replacement: its module, file and line."""
    owner = _found(module, function.rpartition(".")[0]) if "." in function else module
    if now is None:
        return "nothing: it was deleted" if owner is not None else "nothing: its class was deleted"
    for part in _inside(now):
        if isinstance(part, FunctionType):
            code = part.__code__
            return f"{part.__module__} ({os.path.abspath(code.co_filename)}:{code.co_firstlineno})"
    return f"{running.get(now, '__module__') or type(now).__module__} ({type(now).__name__})"
