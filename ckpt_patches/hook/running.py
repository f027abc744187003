"""The code that runs in this process, and the plans for it: a fix is active in all of its modules, or in none.

Only the code that our loader has run in the modules of `sys.modules` counts, not the plan: another hook may have loaded
a target, or a target was imported before our hook was installed. A fix that edits such a module is dropped from all of
its modules, with a warning. This module holds no lock: two threads that import their first targets at the same time
may plan the same tree twice. Modules and finders are foreign code: only `find_spec` of theirs is called.
"""

import os
import sys
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import SourceFileLoader

from ckpt_patches.engine.registry import EVERYTHING, FOLDERS, PART_OF, TARGETS, root_of
from ckpt_patches.errors import StrictModeError
from ckpt_patches.runtime.ranks import is_rank_zero

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType
    from typing import Any

    from ckpt_patches import Switches
    from ckpt_patches.engine.plan import FilePlan, TreePlan

INSTEAD = "import it before another import hook is installed, or write the fix into the files with `ckpt-patches apply`"


class RunsEditedCode(SourceFileLoader):
    """The base class of our loader that runs edited code."""


class LooksFirst:
    """The base class of our loader that wraps another loader."""

    loader: "Any"


# By (tree, root of modules, fixes to skip, overlays): the plan, and by (fix, module) why a fix could not edit a module
# when the plan was made.
_plans: "dict[tuple[str, str, frozenset[str], tuple[str, ...]], tuple[TreePlan, dict[tuple[str, str], str]]]" = {}
# Targets in which our loader has run edited code: the module, its spec at that time, and the file.
_run: "dict[str, tuple[ModuleType, Any, FilePlan]]" = {}
# Targets that were loaded without our loader, or without an edit, and are already reported: the specs by module name.
_examined: "dict[str, Any]" = {}
# Additional checks that `examine` calls: that of `functions`, once an edited module is loaded.
looks: "list[Callable[..., None]]" = []


def record(module: "ModuleType", file: "FilePlan") -> None:
    """Record that our loader runs a file's edited code in a module."""
    _run[file.module] = (module, module.__spec__, file)


def keep_unedited(module: str, spec: ModuleSpec) -> None:
    """Record that the plan has no edit for a module, which its ordinary loader is about to load."""
    _run.pop(module, None)
    _examined[module] = spec


def is_ours(module: str) -> bool:
    """Whether our loader has loaded a target in sys.modules, or is about to."""
    if _file_in(module) is not None or _is_a(_loader_of(module), RunsEditedCode):
        return True
    return get(_spec_of(module), "_initializing") is True and _patched_in(_loader_of(module)) is not None


def plan_for(module: str, path: str, switches: "Switches") -> "TreePlan | None":
    """The plan for the tree of a target that is about to be loaded from `path`.

    None, with a warning, if planning fails. The plan is made at the first target of a tree, and again when the file or
    the loaded code has changed.

    Raises:
        StrictModeError: in strict mode, planning failed.
    """
    try:
        path = os.path.abspath(path)
        return _current_plan(_root(module, path), root_of(module), switches, module, _text(path))
    except Exception as error:  # never stop a program that would have run without us
        from ckpt_patches.hook import log_lines

        log_lines.log_unpatched(module, path, error, switches)
        return None


def make_plan(
    root: str, package: str, switches: "Switches", of: str = ""
) -> "tuple[TreePlan, dict[tuple[str, str], str]]":
    """Plan a tree without the fixes that would run in only some of their modules; also return the reasons.

    `of`: plan only the fixes of modules with this root.
    """
    from ckpt_patches.engine.plan import fixes_for, plan_tree

    names = fixes_for(package, switches.skip, switches.overlays)
    if of:
        names = [name for name in names if root_of(EVERYTHING[name][0]) == of]
    unavailable: dict[tuple[str, str], str] = {}
    plan = plan_tree(root, package, names)
    while found := _unavailable(plan):
        unavailable.update(found)
        plan = plan_tree(root, package, names, unavailable=unavailable)
    return plan, unavailable


def has_plans(module: str) -> bool:
    """Whether a tree was planned for modules with the same root as this one."""
    return any(planned == root_of(module) for _, planned, _, _ in _plans)


def plans(switches: "Switches") -> "Iterator[TreePlan]":
    """The plans of the trees from which targets were imported."""
    for (root, modules, skip, overlays), _ in list(_plans.items()):
        if (skip, overlays) == (switches.skip, switches.overlays):
            yield _current_plan(root, modules, switches)


def not_examined() -> list[str]:
    """Targets that were loaded without our loader, and are not reported yet."""
    return [module for module in TARGETS if _is_loaded(module) and not is_ours(module) and not _is_examined(module)]


def examine(switches: "Switches", *, again: bool = False, at_exit: bool = False) -> None:
    """Warn about fixes that do not run because of the targets in `not_examined` (`again`: all loaded targets).

    Raises:
        StrictModeError: in strict mode, there is one; at every call.
    """
    try:
        modules = [module for module in TARGETS if _is_loaded(module)] if again else not_examined()
        if switches.mode == "strict" or is_rank_zero(os.environ):
            _log_what_does_not_run(modules, _trees_of_packages() if again else {}, switches, at_exit)
            for look in looks:
                look(switches, at_exit=at_exit)
        _examined.update((module, _spec_of(module)) for module in modules)
    except StrictModeError:
        raise
    except Exception as error:  # never stop a program that would have run without us
        if sys.stderr is not None:
            print(f"ckpt-patches: could not look at what runs: {type(error).__name__}: {error}", file=sys.stderr)


def _trees_of_packages() -> "dict[tuple[str, str], None]":
    """The trees of the imported packages, also without an imported target: targets may have been refused or moved."""
    from ckpt_patches.engine.plan import tree_root

    imported = (name for name in (*FOLDERS, *PART_OF) if _is_loaded(name))
    origins = {name: os.path.abspath(_origin(name)) for name in imported}
    roots = {name: tree_root(origin, name) for name, origin in origins.items()}
    return {(root, name): None for name, root in roots.items() if root is not None}


def _log_what_does_not_run(
    modules: list[str], trees: "dict[tuple[str, str], None]", switches: "Switches", at_exit: bool
) -> None:
    from ckpt_patches.hook import log_lines

    for module in modules:
        path = os.path.abspath(_origin(module))
        try:
            trees[_root(module, path), root_of(module)] = None
        except Unpatchable as error:
            log_lines.log_unpatched(module, path, error, switches, at_exit=at_exit)
    for root, planned in trees:
        log_lines.tell(_current_plan(root, planned, switches), switches, at_exit=at_exit)


class Unpatchable(Exception):
    """A module that exists, but whose path does not show its tree."""


def _root(module: str, path: str) -> str:
    from ckpt_patches.engine.plan import tree_root

    root = tree_root(path.removesuffix("c") if path.endswith(".pyc") else path, module)
    if root is None:
        raise Unpatchable(f"expected a path that ends in the module's name, {module}")
    return root


def _text(path: str) -> bytes | None:
    """A digest of a file's text; None if it cannot be read (an existing plan then stays)."""
    from ckpt_patches.engine.plan import text_digest

    try:
        with open(path, "rb") as file:
            return text_digest(file.read())
    except OSError:
        return None


def _current_plan(
    root: str, modules: str, switches: "Switches", module: str = "", text: bytes | None = None
) -> "TreePlan":
    """The up-to-date plan of a tree, for modules with one root; `text` is the digest of `module`'s text."""
    key = (root, modules, switches.skip, switches.overlays)
    plan, unavailable = _plans.get(key, (None, {}))
    changed = plan is not None and text is not None and plan.texts.get(module, text) != text
    if plan is None or changed or _unavailable(plan) or _is_available_again(root, unavailable):
        plan, unavailable = make_plan(root, PART_OF.get(modules, modules), switches, of=modules)
    _plans[key] = (plan, unavailable)
    return plan


def _unavailable(plan: "TreePlan") -> dict[tuple[str, str], str]:
    """By fix and module, why a fix of the plan does not run in a module that it edits."""
    found = {}
    for module, file in plan.files.items():
        reason = _why_not_ours(module, file.path)
        loaded = _file_in(module)
        for fix in file.fixes:
            if reason:
                found[fix, module] = reason + _half(fix)
            elif loaded is not None and fix not in loaded.fixes:
                found[fix, module] = "it was loaded without this fix: start again"
    return found


def _is_available_again(root: str, unavailable: dict[tuple[str, str], str]) -> bool:
    """Whether a module no longer prevents a fix: it is being reloaded, or another hook is gone."""
    from ckpt_patches.engine.plan import module_path

    return any(
        not _why_not_ours(module, module_path(root, module)) and _file_in(module) is None for _, module in unavailable
    )


def _why_not_ours(module: str, path: str) -> str:
    """Why our hook does not load a target, or did not; empty if it does."""
    if not _is_loaded(module):
        return _who_else_would_load(module, path)
    loader = _loader_of(module)
    if is_ours(module):
        return _other_tree(_patched_in(loader), path)
    if type(loader) is SourceFileLoader:
        return "it was imported before the hook was installed, or by a finder in front of it: install the hook first"
    return f"{type(loader).__name__} has loaded it: {INSTEAD}"


def _who_else_would_load(module: str, path: str) -> str:
    from ckpt_patches.engine.installed import find_spec

    try:
        parent = sys.modules.get(module.rpartition(".")[0])
        spec = find_spec(module, list(_attribute(parent, "__path__") or [os.path.dirname(path)]))
    except Exception:
        return ""  # the import will raise the same error
    loader: Any = spec.loader if spec is not None else None
    if _is_a(loader, LooksFirst):
        loader = loader.loader
    patched = _patched_in(loader)
    if patched is not None:
        return _other_tree(patched, path)
    return f"{type(loader).__name__}, of another import hook, loads it: {INSTEAD}" if loader is not None else ""


def _patched_in(loader: "Any") -> RunsEditedCode | None:
    """Our loader, by itself or inside another one: tracing tools wrap our loader and call it."""
    inner = loader if _is_a(loader, RunsEditedCode) else get(loader, "loader")
    return inner if _is_a(inner, RunsEditedCode) else None


def _is_a(loader: object, kind: type) -> bool:
    """Whether a loader is one of ours, by its actual type: a proxy reports another class as its own."""
    return issubclass(type(loader), kind)


def _other_tree(loader: RunsEditedCode | None, path: str) -> str:
    other = path if loader is None else os.path.abspath(loader.path)
    return "" if other == path else f"it is loaded from {other}, of another tree"


def _half(fix: str) -> str:
    """The end of a message, if another part of a fix already runs and cannot be undone."""
    files = {module: _file_in(module) for module in EVERYTHING[fix]}
    loaded = [module for module, file in files.items() if file is not None and fix in file.fixes]
    return f". Its part in {', '.join(loaded)} is loaded already: start again without that hook" if loaded else ""


# Access to sys.modules. An entry can be anything: a stub, or a module that loads itself at the first access.


def _file_in(module: str) -> "FilePlan | None":
    """The file whose edited code our loader has run in a loaded module."""
    loaded, spec, file = _run.get(module, (None, None, None))
    return file if loaded is not None and sys.modules.get(module) is loaded and _spec_of(module) is spec else None


def _is_loaded(module: str) -> bool:
    return issubclass(type(sys.modules.get(module)), type(sys))


def _is_examined(module: str) -> bool:
    return module in _examined and _examined[module] is _spec_of(module)


def _spec_of(module: str) -> "Any":
    return _attribute(sys.modules.get(module), "__spec__")


def _loader_of(module: str) -> "Any":
    return get(_spec_of(module), "loader")


def _origin(module: str) -> str:
    return str(get(_spec_of(module), "origin") or _attribute(sys.modules.get(module), "__file__") or "?")


def get(thing: object, name: str) -> "Any":
    try:
        return getattr(thing, name, None)
    except Exception:
        return None


def _attribute(module: object, name: str) -> "Any":
    """An attribute of a module, without running code of the module."""
    return object.__getattribute__(module, "__dict__").get(name) if issubclass(type(module), type(sys)) else None
