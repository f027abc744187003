"""The part of the import hook that runs when a target module is met: find it, plan its tree, load the edited source."""

import gc
import linecache
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any

from ckpt_patches import report
from ckpt_patches.plan import FilePlan, Outcome, TreePlan, fixes_for, plan_tree, tree_root
from ckpt_patches.registry import FIXES, TARGETS
from ckpt_patches.startup import PatchFinder, Switches


class PatchedLoader(SourceFileLoader):
    """Loads one upstream module from its edited source; upstream's bytecode is neither read nor written.

    A `.pyc` beside the upstream file may be stale (unchecked hash); one with edited code would outlive an uninstall.
    """

    def __init__(self, plan: FilePlan) -> None:
        super().__init__(plan.module, plan.path)
        self.plan = plan

    def get_data(self, path: Any) -> bytes:
        return self.plan.patched if path == self.path else super().get_data(path)

    def get_code(self, fullname: str) -> CodeType:
        # What tracebacks, debuggers and inspect.getsource show is what runs.
        lines = (self.get_source(fullname) or "").splitlines(keepends=True)
        linecache.cache[self.plan.path] = (len(self.plan.patched), None, lines, self.plan.path)
        return self.plan.code


def _show_edited_lines() -> None:
    """Have uncaught exceptions printed by `traceback`, unless the program has a hook of its own.

    Up to Python 3.12 the interpreter itself prints them, with the lines of the file on disk, which are others.
    """
    if sys.version_info < (3, 13) and sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_exception


def _print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    import traceback

    if sys.stderr is not None:
        traceback.print_exception(kind, error, trace)


_lock = threading.Lock()
_plans: dict[tuple[str, str, frozenset[str]], TreePlan] = {}


def find_patched_spec(
    finder: PatchFinder, fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """The spec that the finders behind ours give for a target module, with our loader where a fix edits it.

    Raises:
        ImportError: in strict mode, if a fix of this module does not match, or the module has no editable source.
    """
    spec = _ordinary_spec(finder, fullname, path, target)
    if spec is None:
        return None
    try:
        plan = _plan_for(spec, finder.switches)
    except StrictModeError:
        raise
    except Exception as error:  # never stop a program that would have run without us
        _unpatched(finder.switches, spec, error)
        return spec
    file = plan.files.get(fullname)
    if file is not None:
        spec.loader = PatchedLoader(file)
        _show_edited_lines()
    return spec


def _ordinary_spec(
    finder: PatchFinder, fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """Ask the other finders in their order: path entries, editable installs, other hooks."""
    for other in list(sys.meta_path):
        if other is finder:
            continue
        find_spec = getattr(other, "find_spec", None)
        spec: ModuleSpec | None = find_spec(fullname, path, target) if find_spec else None
        if spec is not None:
            return spec
    return None


class Unpatchable(Exception):
    """A module that is there, in a form that cannot be edited."""


class StrictModeError(ImportError):
    """With `CKPT_PATCHES=strict`, a module that a fix should edit and cannot is not imported."""


def _plan_for(spec: ModuleSpec, switches: Switches) -> TreePlan:
    """The plan of the tree that a module is in: made when its first target is met, and again if a file changed."""
    if type(spec.loader) is not SourceFileLoader:
        raise Unpatchable(f"no source to edit: it is loaded by {type(spec.loader).__name__}")
    path = os.path.abspath(spec.loader.path)
    root = tree_root(path, spec.name)
    if root is None:
        raise Unpatchable(f"expected a path that ends in the module's name, {spec.name}")
    package = TARGETS[spec.name]
    key = (root, package, switches.skip)
    with _lock:
        plan = _plans.get(key)
        if plan is None or _changed(plan, spec.name, path):
            with _without_garbage_collection():
                plan = plan_tree(root, package, fixes_for(package, switches.skip))
            _plans[key] = plan
            mismatches = [result for result in plan.results if result.outcome is Outcome.NO_MATCH]
            report.announce(plan)
            if mismatches and switches.mode == "strict":
                del _plans[key]
                raise StrictModeError(report.mismatch(plan, mismatches[0]), name=spec.name, path=path)
        return plan


def _changed(plan: TreePlan, module: str, path: str) -> bool:
    """Whether a planned file is another one by now: an upstream checkout that is being worked on, and reloaded."""
    file = plan.files.get(module)
    if file is None:
        return False
    with open(path, "rb") as current:
        return current.read() != file.original


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A syntax tree is tens of thousands of objects; collecting while it grows takes as long as parsing it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _unpatched(switches: Switches, spec: ModuleSpec, error: Exception) -> None:
    """Say that a module is loaded as it is, or refuse to load it in strict mode."""
    fixes = [name for name in fixes_for(TARGETS[spec.name], switches.skip) if spec.name in FIXES[name]]
    if not fixes:
        return
    message = report.unpatched(fixes, spec.name, spec.origin, error)
    if switches.mode == "strict":
        raise StrictModeError(message, name=spec.name, path=spec.origin) from error
    report.warn(message)
