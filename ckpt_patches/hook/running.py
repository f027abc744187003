"""What runs in this process, and the plans that follow from it: a fix is active in all of its modules, or in none.

What runs is what `sys.modules` holds, and never what was intended: another hook may have loaded a target, or it was
imported before ours was there. A fix that edits such a module is taken away as a whole, and that is said.
No lock is held anywhere in here. Two threads that meet their first targets at once may plan the same twice.
"""

import gc
import os
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader

from ckpt_patches import StrictModeError, is_rank_zero
from ckpt_patches.engine.registry import FIXES, TARGETS
from ckpt_patches.hook.loader import CheckedLoader, PatchedLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ckpt_patches.engine.plan import TreePlan
    from ckpt_patches.startup import Switches

INSTEAD = "import it before another import hook is installed, or write the fix into the files with `ckpt-patches apply`"

# By tree, package, and the fixes to skip: the plan, and the finders that were there when it was made.
_plans: "dict[tuple[str, str, frozenset[str]], tuple[TreePlan, tuple[object, ...]]]" = {}
# Targets in sys.modules of which all has been said: the module's name, and which load of it.
_examined: set[tuple[str, int]] = set()


def plan_for(module: str, path: str, switches: "Switches") -> "TreePlan | None":
    """The plan of the tree of a target that is about to be loaded from `path`; None, which is said, if there is none.

    Made when the first target of a tree is met, and anew when the file or what runs is not what it was.

    Raises:
        StrictModeError: there is none, in strict mode.
    """
    from ckpt_patches.hook import report

    try:
        path = os.path.abspath(path)
        with open(path, "rb") as file:
            text = hash(file.read())
        return _current_plan(_root(module, path), TARGETS[module], switches, {module: text})
    except Exception as error:  # never stop a program that would have run without us
        report.tell_unpatched(module, path, error, switches)
        return None


def make_plan(root: str, package: str, skip: frozenset[str]) -> "TreePlan":
    """Plan a tree, without the fixes that would run by halves in this process."""
    from ckpt_patches.engine.plan import fixes_for, plan_tree

    unavailable: dict[tuple[str, str], str] = {}
    collects = gc.isenabled()
    gc.disable()  # a tree's nodes are tens of thousands of objects: to collect meanwhile takes as long as to parse
    try:
        while True:
            plan = plan_tree(root, package, fixes_for(package, skip), unavailable=unavailable)
            found = _unavailable(plan)
            if not found:
                return plan
            unavailable.update(found)
    finally:
        if collects:
            gc.enable()


def keep_unedited(module: str, spec: ModuleSpec) -> None:
    """Remember that the plan has nothing for a module which an ordinary loader is about to load."""
    _examined.add((module, id(spec)))


def not_examined() -> list[str]:
    """Targets that are loaded, not by us, and of which nothing has been said yet."""
    return [module for module in TARGETS if (load := _load_of_others(module)) and (module, load) not in _examined]


def examine(switches: "Switches") -> None:
    """Say which fixes do not run because of what `not_examined` finds.

    Raises:
        StrictModeError: there is one, in strict mode.
    """
    if switches.mode != "strict" and not is_rank_zero(os.environ):
        return
    from ckpt_patches.hook import report

    modules = not_examined()
    _examined.update((module, _load_of_others(module)) for module in modules)
    trees: dict[tuple[str, str], None] = {}
    for module in modules:
        path = os.path.abspath(_origin(module))
        try:
            trees[_root(module, path), TARGETS[module]] = None
        except Unpatchable as error:
            report.tell_unpatched(module, path, error, switches)
    for root, package in trees:
        report.tell(_current_plan(root, package, switches), switches)


def examine_at_exit(switches: "Switches") -> None:
    """The last look: nothing is imported any more, and nothing can be stopped."""
    if not is_rank_zero(os.environ):
        return
    try:
        examine(switches)
    except StrictModeError as error:
        if sys.stderr is not None:
            print(f"ckpt-patches: {error}", file=sys.stderr)


class Unpatchable(Exception):
    """A module that is there, in a place where its tree cannot be told."""


def _root(module: str, path: str) -> str:
    from ckpt_patches.engine.plan import tree_root

    root = tree_root(path.removesuffix("c") if path.endswith(".pyc") else path, module)
    if root is None:
        raise Unpatchable(f"expected a path that ends in the module's name, {module}")
    return root


def _current_plan(root: str, package: str, switches: "Switches", texts: "dict[str, int] | None" = None) -> "TreePlan":
    """The plan of a tree as it is now, given the texts (their hashes) of some of its modules."""
    key = (root, package, switches.skip)
    finders = tuple(sys.meta_path)
    plan, before = _plans.get(key, (None, ()))
    if plan is not None and texts and any(plan.texts.get(m, text) != text for m, text in texts.items()):
        plan = None
    if plan is None or _unavailable(plan, predict=finders != before):
        plan = make_plan(root, package, switches.skip)
    _plans[key] = (plan, finders)
    return plan


def _unavailable(plan: "TreePlan", *, predict: bool = True) -> dict[tuple[str, str], str]:
    """By fix and module, why a fix of the plan does not run in a module that it edits.

    `predict`: also for modules that are not loaded yet, by asking who would load them.
    """
    found = {}
    for module, file in plan.files.items():
        reason = _why_not_ours(module, file.path, predict)
        loaded_with = _fixes_in(module)
        for fix in file.fixes:
            if reason:
                found[fix, module] = reason + _half(fix)
            elif loaded_with is not None and fix not in loaded_with:
                found[fix, module] = "it was loaded without this fix: reload it"
    return found


def _why_not_ours(module: str, path: str, predict: bool) -> str:
    """Why the hook does not load a target, or has not; empty if it does."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        loader = getattr(loaded.__spec__, "loader", None)
        if isinstance(loader, PatchedLoader):
            return ""
        if type(loader) is SourceFileLoader:
            return (
                "it was imported before the hook was installed, or by a finder in front of it: install the hook first"
            )
        return f"{type(loader).__name__} has loaded it: {INSTEAD}"
    return _who_else_would_load(module, path) if predict else ""


def _who_else_would_load(module: str, path: str) -> str:
    from ckpt_patches.engine.installed import find_spec

    parent = sys.modules.get(module.rpartition(".")[0])
    folders = list(getattr(parent, "__path__", [os.path.dirname(path)]))
    try:
        spec = find_spec(module, folders)
    except Exception:
        return ""  # the import will raise the same
    loader = spec.loader if spec is not None else None
    if isinstance(loader, PatchedLoader):
        other = os.path.abspath(loader.path)
        return "" if other == path else f"it would be loaded from {other}, of another tree"
    if isinstance(loader, CheckedLoader):
        loader = loader.loader
    return f"{type(loader).__name__}, of another import hook, loads it: {INSTEAD}" if loader is not None else ""


def _half(fix: str) -> str:
    """What to say where another part of a fix runs already, and cannot be taken back."""
    loaded = [module for module in FIXES[fix] if fix in (_fixes_in(module) or ())]
    return f". Its part in {', '.join(loaded)} is loaded already: start again without that hook" if loaded else ""


def _fixes_in(module: str) -> tuple[str, ...] | None:
    """The fixes that a module was loaded with; None if it is not loaded, not yet, or not by us."""
    loader = getattr(getattr(sys.modules.get(module), "__spec__", None), "loader", None)
    return loader.file.fixes if isinstance(loader, PatchedLoader) and loader.file is not None else None


def _load_of_others(module: str) -> int:
    """Identifies a load of a target that was not ours; 0 if it is not loaded, or by us."""
    loaded = sys.modules.get(module)
    spec = getattr(loaded, "__spec__", None)
    if loaded is None or isinstance(getattr(spec, "loader", None), PatchedLoader):
        return 0
    return id(spec) if spec is not None else id(loaded)


def _origin(module: str) -> str:
    loaded = sys.modules[module]
    return getattr(getattr(loaded, "__spec__", None), "origin", None) or getattr(loaded, "__file__", None) or "?"
