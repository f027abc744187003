"""What was planned for this process, and what runs: a fix is active in all of its modules, or in none.

The tree of an upstream package is planned once, outside of the import lock, when the first module is loaded that a fix
edits: two threads may do so at the same time, and one of the plans is used. `Tree.problems` compares the plan with what
our loader left in the modules: another hook may have loaded one, and another package may have replaced a function.
"""

import contextlib
import io
import linecache
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from importlib.util import decode_source
from types import CodeType, ModuleType
from typing import Any

from ckpt_patches import ROOTS, PatchedLoader, StrictModeError, Switches, examine
from ckpt_patches.engine.fix import load, targets
from ckpt_patches.engine.installed import absolute, state_folder, version_in
from ckpt_patches.engine.plan import FilePlan, FixResult, Outcome, TreePlan, fixes_for, plan_tree, tree_root
from ckpt_patches.engine.registry import PART_OF, root_of
from ckpt_patches.engine.releases import too_old
from ckpt_patches.errors import UserError
from ckpt_patches.hook import log_lines
from ckpt_patches.hook.functions import Change, change, found, namespace
from ckpt_patches.runtime.shown import shortened

TWO_LINES = 300  # characters of a reason
Functions = Mapping[str, Sequence[str]]  # by function, the fixes that edit it


@dataclass(eq=False, repr=False)
class Part:
    """What is edited in one module, and what that was when the module had run."""

    name: str
    path: str
    file: FilePlan | None
    functions: Functions  # edited by the hook or in place
    module: ModuleType | None = None
    left: dict[str, Any] = field(default_factory=dict)  # by function, the object

    def run(self, module: ModuleType, execute: Callable[[ModuleType], None]) -> None:
        """Execute the module, and keep what it leaves."""
        self.module = module
        _ran[self.name] = self
        execute(module)
        self.left = {function: found(module, function) for function in self.functions}

    def code(self) -> CodeType:
        """The edited code. Shows its lines in tracebacks, `inspect` and debuggers."""
        assert self.file is not None
        lines = io.StringIO(decode_source(self.file.patched)).readlines()
        for path in (self.path, self.file.path):  # the latter is absolute, and that of the code
            # Without an mtime, `linecache` does not compare the lines with the file.
            linecache.cache[path] = (len(self.file.patched), None, lines, path)
        return self.file.code


@dataclass(eq=False, repr=False)
class Tree:
    """The plan for the modules of one of the `ROOTS` in a folder with upstream packages."""

    name: str  # the distribution and its release
    plan: TreePlan
    applied: Sequence[str] = ()  # fixes that are active in place
    in_place: Mapping[str, Functions] = field(default_factory=dict)  # by module
    defect: str = ""  # why there is no plan, or that the release is too old

    def problems(self) -> dict[str, str]:
        """By fix, why it does not run."""
        unmatched = [result for result in self.plan.results if result.outcome is Outcome.NO_MATCH]
        problems = {result.name: f"NOT active: {shortened(result.reason, TWO_LINES)}" for result in unmatched}
        for fix, reason in _not_run(self.plan).items():
            problems.setdefault(fix, f"NOT active: {reason}")
        for fix, changed in self.changes():
            if not changed.wraps:
                problems.setdefault(fix, f"NOT active any more: {changed.text}")
        return problems

    def changes(self) -> Iterator[tuple[str, Change]]:
        """By fix, the edited functions that were replaced or wrapped."""
        for part in list(_ran.values()):
            module = sys.modules.get(part.name)
            if module is part.module and (part.name in self.plan.files or part.name in self.in_place):
                for function, left in part.left.items():
                    if changed := change(module, part.name, function, left):
                        yield from ((fix, changed) for fix in part.functions[function])

    def report(self) -> Iterator[str]:
        """The state of each fix that the tree needs, for people."""
        problems, changes = self.problems(), list(self.changes())
        yield from filter(None, (f"{self.name} ({self.plan.root})", self.defect))
        for fix in (*self.plan.named(Outcome.APPLIES), *self.applied):
            wrapped = [changed.text for by, changed in changes if by == fix]
            state = "active in place" if fix in self.applied else "active"
            yield f"  {fix}: {problems.pop(fix, '') or '; '.join([state, *wrapped])}"
        yield from (f"  {fix}: {what}" for fix, what in problems.items())


_trees: dict[tuple[str, str, Switches], Tree] = {}  # by folder, package and switches, the plan
_ran: dict[str, Part] = {}  # by module, what our loader has run in it


def part_of(name: str, path: str, switches: Switches) -> Part | None:
    """What is edited in a module that is loaded from `path`, if anything. Plans its tree, if it is new or changed."""
    if name not in targets(root_of(name)):
        return None
    place = tree_root(absolute(path), name) or "", root_of(name), switches
    tree = _tree(place)
    if name in tree.plan.texts and _has_changed(path, tree.plan.texts[name]):
        tree = _trees[place] = _planned(*place)
    examine(switches)
    file, in_place = tree.plan.files.get(name), tree.in_place.get(name, {})
    if file is None and not in_place:
        linecache.cache.pop(path, None)  # a reload may have had an edit before
        return None
    return Part(name, path, file, {**in_place, **(file.functions if file is not None else {})})


def examine_all(switches: Switches, *, at_exit: bool = False) -> None:
    """Log what does not run in the imported packages, once, on rank 0. Raises StrictModeError, but not at exit."""
    is_strict = switches.mode == "strict"
    level = logging.ERROR if is_strict and at_exit else logging.WARNING
    for tree in trees(switches):
        problems = [log_lines.problem(fix, what, tree.name) for fix, what in tree.problems().items()]
        for message in filter(None, (tree.defect, *problems)):
            log_lines.log(level, message, at_exit=at_exit)
            if is_strict and not at_exit:
                raise StrictModeError(message)


def trees(switches: Switches) -> list[Tree]:
    """The trees of the imported packages, with those from which others have loaded a module that a fix edits."""
    read = {name for (_, _, own), tree in list(_trees.items()) if own is switches for name in tree.plan.texts}
    for name in (name for root in ROOTS if root in sys.modules for name in targets(root) if name not in read):
        module = namespace(sys.modules.get(name))
        path = getattr(module.get("__spec__"), "origin", None) or module.get("__file__")
        if isinstance(path, str):
            source = absolute(path.removesuffix("c") if path.endswith(".pyc") else path)
            read |= _tree((tree_root(source, name) or "", root_of(name), switches)).plan.texts.keys()
    return [tree for (_, _, own), tree in list(_trees.items()) if own is switches]


def _tree(place: tuple[str, str, Switches]) -> Tree:
    """The tree at a place of `_trees`, planned if it is new."""
    return _trees.get(place) or _trees.setdefault(place, _planned(*place))


def _planned(root: str, package: str, switches: Switches) -> Tree:
    """Plan a tree, and log which fixes are active; without those that would run in only some of their modules."""
    upstream, lost = PART_OF.get(package, package), dict[str, FixResult]()
    try:
        names = [name for name in fixes_for(upstream, switches.skip, switches.overlays) if load(name).root == package]
        if not root:
            raise ValueError("expected files that are named like their modules, found others")
        plan = plan_tree(root, upstream, names)
        while more := _not_run(plan):
            lost.update({fix: FixResult(fix, Outcome.NO_MATCH, why) for fix, why in more.items()})
            plan = plan_tree(root, upstream, [name for name in names if name not in lost])
        plan = plan._replace(results=(*plan.results, *lost.values()))
    except Exception as error:  # never stop a program that would have run without us
        why = f"{ROOTS[package]}: no fix is active: {type(error).__name__}: {shortened(str(error), TWO_LINES)}"
        return Tree(ROOTS[package], TreePlan(upstream, root, (), {}, {}), defect=why)
    for wrong in log_lines.unknown_skips(switches.skip):
        log_lines.log(logging.WARNING, wrong)
    version = version_in(root, upstream)
    written, in_place = _written_in_place(root, upstream)
    applied = [name for name in written if name in plan.named(Outcome.NOT_NEEDED)]
    tree = Tree(f"{ROOTS[package]} {version}", plan, applied, in_place, too_old(upstream, version))
    active = plan.named(Outcome.APPLIES)
    if active or applied or package == upstream:  # not of a further part of the package that needs no fix
        log_lines.announce(tree.name, root, active, applied)
    return tree


def _has_changed(path: str, planned: int) -> bool:
    """Whether a file was written since its tree was planned. One that cannot be read for a moment was not."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return hash(file.read()) != planned
    return False


def _written_in_place(root: str, package: str) -> tuple[Sequence[str], Mapping[str, Functions]]:
    """The fixes that `ckpt-patches apply` wrote, and by module their functions; none if a file is another one now."""
    if state_folder(root, package).exists():
        from ckpt_patches.inplace.rewrite import in_place

        with contextlib.suppress(UserError):  # `status`, `apply` and `revert` say what is wrong
            state = in_place(root, package)
            return state.fixes, state.functions
    return (), {}


def _not_run(plan: TreePlan) -> dict[str, str]:
    """By fix, a loaded module in which the code of the plan does not run, and why."""
    places = ((file, fix) for file in plan.files.values() for fix in file.fixes)
    return {fix: f"{file.module}: {why}" for file, fix in places if (why := _why_not_run(file, fix))}


def _why_not_run(file: FilePlan, fix: str) -> str:
    """Why a fix does not run in a module that is loaded; empty if it does, or if the module is not loaded."""
    module, part = sys.modules.get(file.module), _ran.get(file.module)
    if not issubclass(type(module), ModuleType):  # absent, or a stub
        return ""
    spec = namespace(module).get("__spec__")
    origin, loader = getattr(spec, "origin", None), getattr(spec, "loader", None)
    if isinstance(origin, str) and absolute(origin) != file.path:
        is_planned = tree_root(absolute(origin), file.module) in [root for root, _, _ in list(_trees)]
        return "" if is_planned else f"it is loaded from {origin}"  # that plan says what runs
    if part is not None and part.module is module:
        has = part.file is not None and fix in part.file.fixes
        return "" if has else "it was loaded without this fix: start the program again"
    is_inside = isinstance(getattr(loader, "loader", None), PatchedLoader)  # of a tracing tool's loader
    if type(loader) is PatchedLoader or (is_inside and getattr(spec, "_initializing", False)):
        return ""  # about to run, in this thread or another
    if type(loader) is SourceFileLoader:
        return "it was imported before the hook was installed, or by a finder in front of it: install the hook first"
    return f"{type(loader).__name__}, of another import hook, loaded it: install that later, or use ckpt-patches apply"
