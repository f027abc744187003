"""Plug-ins: fixes from other installed distributions, declared as entry points of the group `ckpt_patches.fixes`.

They are read when the first upstream package is loaded, in that thread and outside Python's import lock, because a
plug-in can run any code. An unusable plug-in stops nothing; `errors` reports it.
"""

import re
import sys
import threading
from collections.abc import Container, Iterable
from importlib import metadata

from ckpt_patches import ROOTS
from ckpt_patches.engine import registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeGuard

    from ckpt_patches.engine.fix import Fix

GROUP = "ckpt_patches.fixes"

# By error message: the fix that is not active because of it.
errors: dict[str, str] = {}
_thread = threading.local()
_brought_by: dict[str, str] = {}  # distribution by fix


def names() -> set[str]:
    """The names of the fixes of all plug-ins, without loading them."""
    return {point.name for point in _entry_points()}


def read() -> bool:
    """Add the fixes of all plug-ins to the registry, once; does nothing when a plug-in's own import calls it again.

    Returns whether this call read them.
    """
    if registry.has_plugins or getattr(_thread, "is_reading", False):
        return False
    _thread.is_reading = True
    try:
        for point in _entry_points():
            _add(point)
    finally:
        _thread.is_reading = False
    registry.has_plugins = True
    return True


def complaints(skip: Container[str]) -> list[str]:
    """The errors of plug-ins whose fix is not skipped."""
    return [message for message, name in errors.items() if name not in skip]


def _entry_points() -> list[metadata.EntryPoint]:
    try:
        return sorted(metadata.entry_points(group=GROUP), key=lambda point: (_distribution(point), point.name))
    except Exception as error:  # caused by the metadata of any distribution
        errors[f"the entry points of {GROUP} cannot be read: {type(error).__name__}: {_line(error)}"] = ""
        return []


def _distribution(point: metadata.EntryPoint) -> str:
    return f"{point.dist.metadata['Name']} {point.dist.version}" if point.dist else "?"


def _line(what: object) -> str:
    return " ".join(str(what).split())[:300]


class _Unusable(Exception):
    """An entry point provides no usable fix, with the reason."""


def _add(point: metadata.EntryPoint) -> None:
    brought_by = _distribution(point)
    try:
        fix = point.load()
        if registry.PLUGINS.get(point.name) is not fix and _check(point, fix):  # another thread may have added it
            _register(fix, brought_by)
        return
    except _Unusable as error:
        reason = str(error)
    except (Exception, SystemExit) as error:
        reason = f"{point.value} cannot be loaded: {type(error).__name__}: {_line(error)}"
    message = f"the fix {_line(point.name)} of {brought_by} is NOT active: {reason}"
    errors[f"{message}. Repair or uninstall it, or set CKPT_PATCHES_SKIP={_line(point.name)}"] = point.name


def _check(point: metadata.EntryPoint, fix: object) -> "TypeGuard[Fix]":
    from ckpt_patches.engine.fix import Fix
    from ckpt_patches.engine.requirements import parse

    if not isinstance(fix, Fix):
        raise _Unusable(f"expected a ckpt_patches.engine.fix.Fix in {point.value}, found a {type(fix).__name__}")
    if fix.name != point.name or not re.fullmatch(r"\w+", fix.name):
        raise _Unusable(f"expected the entry point to have the name of the fix's module, {fix.name}")
    if not getattr(sys.modules.get(fix.module_name), "__file__", None):
        raise _Unusable(f"expected Fix(__name__, ...), found no file of a module {fix.module_name}")
    if fix.name in registry.EVERYTHING:
        raise _Unusable(f"{_brought_by.get(fix.name, 'training-checkpoint-patches')} has a fix of that name")
    if not fix.edits or fix.switch:
        raise _Unusable("expected a fix with edits and without a switch")
    packages = {registry.root_of(module) for module in _modules(fix)}
    if len(packages) != 1 or "" in packages:
        raise _Unusable(
            f"expected modules of one of {', '.join(ROOTS)}, found {', '.join(_modules(fix))}; "
            "another package needs ckpt_patches.add_root in a .pth file"
        )
    for other in fix.depends_on:
        if registry.root_of(*registry.FIXES.get(other, ("",))[:1]) not in packages:
            raise _Unusable(f"it depends on {other}: expected a fix of the same package that comes before it")
    for requirement in fix.requires:
        try:
            parse(requirement)
        except ValueError as error:
            raise _Unusable(str(error)) from None
    return True


def _modules(fix: "Fix") -> Iterable[str]:
    """The modules that a fix edits or reads, without a package's `__init__`, which no import names."""
    concerned = [fix.concerns] if fix.concerns and not fix.concerns.endswith(".__init__") else []
    return tuple(dict.fromkeys([*(edit.module for edit in fix.edits), *concerned]))


def _register(fix: "Fix", brought_by: str) -> None:
    modules = tuple(_modules(fix))
    _brought_by[fix.name] = brought_by
    registry.PLUGINS[fix.name] = fix
    registry.TARGETS.update((module, registry.package_with(module)) for module in modules)
    registry.EVERYTHING[fix.name] = modules
    registry.FIXES[fix.name] = modules
    if fix.off_because:
        registry.OFF_BY_DEFAULT[fix.name] = fix.off_because
