"""Decide, for one tree with an upstream package, what every fix does there. Reads files, changes nothing.

A tree is the folder that holds the package: site-packages, a `--target` folder or a checkout.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import CodeType

from ckpt_patches.fix import Fix, load
from ckpt_patches.registry import FIXES, TARGETS
from ckpt_patches.source import AlreadyThere, NoMatch, NotConcerned, Source, UnreadableSource


class Outcome(Enum):
    """What a fix does in a tree; found in the structure of the source, never by a version number."""

    APPLIES = "applies"
    ALREADY_THERE = "already there"
    NO_MATCH = "no match"
    NOT_PRESENT = "not present"


@dataclass(frozen=True)
class FixResult:
    """The outcome of one fix."""

    name: str
    outcome: Outcome
    reason: str = ""  # for NO_MATCH: file, what was expected, what was found
    unreadable: bool = False  # NO_MATCH because the file is unreadable, not UTF-8, or does not parse


@dataclass(frozen=True)
class FilePlan:
    """The edited text of one upstream file."""

    module: str
    path: str
    original: bytes
    patched: bytes
    code: CodeType  # `patched`, compiled


@dataclass(frozen=True)
class TreePlan:
    """Every fix's outcome in one tree, and every file that changes."""

    package: str
    root: str
    results: tuple[FixResult, ...]
    files: dict[str, FilePlan]  # by module

    def named(self, outcome: Outcome) -> list[str]:
        return [result.name for result in self.results if result.outcome is outcome]


def module_path(root: str, module: str) -> str:
    """Path of a module's source in a tree."""
    return os.path.join(root, *module.split(".")) + ".py"


def tree_root(path: str, module: str) -> str | None:
    """The tree that a module's source file belongs to; None if the path does not end in the module's name."""
    tail = os.path.join(*module.split(".")) + ".py"
    return path[: -len(tail) - 1] or os.sep if path.endswith(os.sep + tail) else None


def fixes_for(package: str, skip: Iterable[str] = ()) -> list[str]:
    """Names of the fixes to an upstream package, in their order."""
    return [name for name, modules in FIXES.items() if TARGETS[modules[0]] == package and name not in skip]


class _Tree:
    """The sources of a tree, each read once; `originals` (by path) stand in for files that were edited in place."""

    def __init__(self, root: str, originals: Mapping[str, bytes]) -> None:
        self.root = root
        self.originals = originals
        self.sources: dict[str, Source | None] = {}

    def source(self, module: str) -> Source | None:
        if module not in self.sources:
            path = module_path(self.root, module)
            try:
                self.sources[module] = Source(self._read(path), path)
            except FileNotFoundError:
                self.sources[module] = None
                if os.path.exists(path + "c"):
                    raise NoMatch("no source, only bytecode") from None
            except OSError as error:
                raise UnreadableSource(f"it cannot be read: {error.strerror}") from error
        return self.sources[module]

    def _read(self, path: str) -> bytes:
        if path in self.originals:
            return self.originals[path]
        with open(path, "rb") as file:
            return file.read()


def plan_tree(
    root: str, package: str, names: Iterable[str] | None = None, originals: Mapping[str, bytes] | None = None
) -> TreePlan:
    """Decide what these fixes (all of the package's, if None) do in a tree.

    `originals` maps paths to the text to start from, for files that are edited on disk already.
    """
    tree = _Tree(root, originals or {})
    results = [_try(load(name), tree) for name in (fixes_for(package) if names is None else names)]
    files: dict[str, FilePlan] = {}
    for module, source in tree.sources.items():
        if source is None or not source.edits:
            continue
        patched = source.edited()
        try:
            code = compile(patched, source.path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            reason = f"{source.path}: the edited source does not compile: {error}"
            return _give_up(root, package, results, reason)
        files[module] = FilePlan(module, source.path, source.data, patched, code)
    return TreePlan(package, root, tuple(results), files)


def _give_up(root: str, package: str, results: list[FixResult], reason: str) -> TreePlan:
    """No fix of this package applies: the edits together do not make a program."""
    failed = [FixResult(r.name, Outcome.NO_MATCH, reason) if r.outcome is Outcome.APPLIES else r for r in results]
    return TreePlan(package, root, tuple(failed), {})


def _try(fix: Fix, tree: _Tree) -> FixResult:
    """Make all edits of a fix, or none."""
    before = {module: list(source.edits) for module, source in tree.sources.items() if source}
    present, edited, missing = False, False, ""
    path = module_path(tree.root, fix.concerns or fix.edits[0].module)
    try:
        if fix.concerns and tree.source(fix.concerns) is None:
            return FixResult(fix.name, Outcome.NOT_PRESENT)
        for edit in fix.edits:
            path = module_path(tree.root, edit.module)
            source = tree.source(edit.module)
            if source is None:
                missing = missing or ("" if edit.optional else path)
                continue
            try:
                edit.function(source)
                edited = True
            except AlreadyThere:
                pass
            except NotConcerned:
                continue
            present = True
        if present and missing:
            path = missing
            raise NoMatch("there is no such file, though the fix's other files are there")
    except (NoMatch, UnreadableSource) as error:
        for module, source in tree.sources.items():
            if source:
                source.edits = before.get(module, [])
        return FixResult(fix.name, Outcome.NO_MATCH, f"{path}: {error}", isinstance(error, UnreadableSource))
    if not present:
        return FixResult(fix.name, Outcome.NOT_PRESENT)
    return FixResult(fix.name, Outcome.APPLIES if edited else Outcome.ALREADY_THERE)
