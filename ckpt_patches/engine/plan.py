"""Decide what every fix does in one tree with an upstream package. Reads files, changes nothing.

A tree is the folder that contains the package: site-packages, a `--target` folder or a checkout.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from ckpt_patches.engine.fix import Edit, Fix, fixes_of, load
from ckpt_patches.engine.installed import contains, version_in
from ckpt_patches.engine.registry import root_of
from ckpt_patches.engine.releases import have_code, too_old
from ckpt_patches.engine.source import NoMatch, NotNeeded, Source, UnreadableSource
from ckpt_patches.errors import UserError
from ckpt_patches.runtime.pause import without_garbage_collection, without_syntax_warnings

CO_OPTIMIZED = 1  # of the code of a function, not of a class
_GENERIC = "<generic parameters of "  # begins the name of the code around a function with type parameters


class Outcome(Enum):
    """What a fix does in a tree, determined from the text of its source.

    Code that is absent means NO_MATCH where the stated releases have it, else NOT_NEEDED.
    """

    APPLIES = "applies"
    NOT_NEEDED = "not needed"
    NO_MATCH = "no match"


class _Found(Enum):
    """What an edit finds in a tree."""

    CODE = "the code to edit"
    FIXED = "code that does not need it"
    NOTHING = "nothing to edit: it only looks, or the releases that have its code are others"


class FixResult(NamedTuple):
    """The outcome of one fix."""

    name: str
    outcome: Outcome
    reason: str = ""  # for NO_MATCH: file, expected and found code
    unreadable: bool = False  # NO_MATCH because the file is unreadable, not UTF-8, or does not parse


class FilePlan(NamedTuple):
    """The edited text of one upstream file."""

    module: str
    path: str
    original: bytes
    patched: bytes
    code: CodeType  # `patched`, compiled
    fixes: tuple[str, ...]  # the fixes that edit it
    functions: dict[str, tuple[str, ...]]  # by name, also `Class.name`: the fixes that edit or add that function


class TreePlan(NamedTuple):
    """The outcome of every fix in one tree, and the edited files."""

    package: str
    root: str
    results: tuple[FixResult, ...]
    files: dict[str, FilePlan]  # by module
    texts: dict[str, int]  # by module, the hash of every text that was read; 0 if there is no file

    def named(self, outcome: Outcome) -> list[str]:
        return [result.name for result in self.results if result.outcome is outcome]

    def check_readable(self) -> None:
        """Raise UserError if a file could not be read; for a tree that a user names."""
        for result in self.results:
            if result.unreadable:
                raise UserError(result.reason)


def module_path(root: str, module: str) -> str:
    """The path of a module's source in a tree; for a package, as Python resolves it, of its `__init__.py`."""
    path = os.path.join(root, *module.split("."))
    package = os.path.join(path, "__init__.py")
    return package if os.path.exists(package) else path + ".py"


def tree_root(path: str, module: str) -> str | None:
    """The tree that a module's source file belongs to; None if the path does not end in the module's name."""
    name = os.path.join(*module.split("."))
    for tail in (name + ".py", os.path.join(name, "__init__.py")):
        if path.endswith(os.sep + tail):
            return path[: -len(tail) - 1] or os.sep
    return None


def fixes_for(package: str, skip: Iterable[str] = (), overlays: Iterable[str] = ()) -> list[str]:
    """The names of the fixes to an upstream package in order, followed by the edits of these overlays."""
    switches = {"", *overlays}
    return [name for name, fix in fixes_of(package).items() if fix.switch in switches and name not in skip]


class _Tree:
    """The sources of a tree, each read and parsed once, with the edits that fixes have requested.

    `originals` (by path) replace files that were edited in place.
    """

    def __init__(self, root: str, package: str, originals: Mapping[str, bytes], for_upstream: bool) -> None:
        self.root = root
        self.package = package
        self.version = version_in(root, package)
        self.for_upstream = for_upstream
        self.originals = originals
        self.sources: dict[str, Source | None] = {}  # by module; None if there is no such file

    def source(self, module: str, path: str) -> Source:
        """The source of a module. Raises NoMatch if there is none, or it cannot be read."""
        if module not in self.sources:
            try:
                data = self.originals[path] if path in self.originals else Path(path).read_bytes()
                expected = partial(have_code, package=self.package, version=self.version)  # no cycle of references
                self.sources[module] = Source(data, path, expected)
            except FileNotFoundError:
                if os.path.exists(path + "c"):
                    raise NoMatch("no source, only bytecode") from None
                self.sources[module] = None
            except OSError as error:
                raise UnreadableSource(f"it cannot be read: {error.strerror}") from error
        source = self.sources[module]
        if source is None:
            raise NoMatch("there is no such file")
        return source

    def edited(self) -> Iterator[tuple[str, Source]]:
        """The modules that are edited."""
        return ((module, source) for module, source in self.sources.items() if source is not None and source.edits)

    def take_back(self, fix: str) -> None:
        """Drop the edits of a fix."""
        for _, source in self.edited():
            source.edits = [edit for edit in source.edits if edit.fix != fix]


@without_garbage_collection()  # until the syntax trees are freed
@without_syntax_warnings()
def plan_tree(
    root: str,
    package: str,
    names: Iterable[str] | None = None,
    originals: Mapping[str, bytes] | None = None,
    *,
    for_upstream: bool = False,
) -> TreePlan:
    """Decide what these fixes (None: all fixes of the package) do in a tree.

    Args:
        root: the tree.
        package: such as `megatron.core`.
        names: the fixes, in order.
        originals: by path, the original text of files that are already edited on disk.
        for_upstream: omit the edits that do not belong in a patch for upstream.
    """
    tree = _Tree(root, package, originals or {}, for_upstream)
    names = fixes_for(package) if names is None else list(names)
    results = [_try(name, tree) for name in names]
    files, defect = _compile(tree)
    if defect:
        results = _one_by_one(names, tree)
        files, _ = _compile(tree)
    texts = {module: hash(source.data) if source else 0 for module, source in tree.sources.items()}
    return TreePlan(package, root, tuple(results), files, texts)


def _compile(tree: _Tree) -> tuple[dict[str, FilePlan], str]:
    """The edited files; and the defect of one of them, if the edits together do not give a valid program."""
    files: dict[str, FilePlan] = {}
    for module, source in tree.edited():
        patched = source.edited()
        try:
            code = compile(patched, source.path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            source.parse_whole()
            return {}, f"{source.path}: the edited source does not compile: {error}"
        if lost := source.used.difference(_defined(code)):
            source.parse_whole()
            return {}, f"{source.path}: the edited source does not define {', '.join(sorted(lost))}"
        fixes = tuple(dict.fromkeys(edit.fix for edit in source.edits))
        functions: dict[str, tuple[str, ...]] = {}
        for edit in sorted((edit for edit in source.edits if edit.function), key=lambda edit: edit.start):
            functions[edit.function] = tuple(dict.fromkeys((*functions.get(edit.function, ()), edit.fix)))
        files[module] = FilePlan(module, source.path, source.data, patched, code, fixes, functions)
    return files, ""


def _defined(code: CodeType, owner: str = "") -> Iterator[str]:
    """The names of the functions, classes and methods (`Class.name`) of a module."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType) and inner.co_name.startswith(_GENERIC):  # def name[T](): its code is within
            yield from _defined(inner, owner)
        elif isinstance(inner, CodeType):
            yield owner + inner.co_name
            if not owner and not inner.co_flags & CO_OPTIMIZED:  # a class
                yield from _defined(inner, f"{inner.co_name}.")


def _one_by_one(names: Sequence[str], tree: _Tree) -> list[FixResult]:
    """Try each fix on top of the valid ones before it, so that a bad edit rejects only its own fix."""
    for name in names:
        tree.take_back(name)
    results: list[FixResult] = []
    for name in names:
        result = _try(name, tree)
        if result.outcome is Outcome.APPLIES and (defect := _compile(tree)[1]):
            tree.take_back(name)
            result = FixResult(name, Outcome.NO_MATCH, defect)
        results.append(result)
    return results


def _try(name: str, tree: _Tree) -> FixResult:
    """Make all edits of a fix, or none."""
    try:
        fix = load(name)
        if too_old(tree.package, tree.version) and not fix.affects(tree.version):
            return FixResult(name, Outcome.NOT_NEEDED, "the release is older than those that the fix is for")
        if _make(fix, tree):
            return FixResult(name, Outcome.APPLIES)
        reason = "only in patches for upstream" if fix.is_for_upstream_alone and not tree.for_upstream else ""
        if tree.for_upstream and all(edit.ours_alone for edit in fix.edits):
            reason = "not in patches for upstream"
        result = FixResult(name, Outcome.NOT_NEEDED, reason)
    except NoMatch as error:
        result = FixResult(name, Outcome.NO_MATCH, str(error), isinstance(error, UnreadableSource))
    except Exception as error:  # a defect of this fix must not affect the others
        result = FixResult(name, Outcome.NO_MATCH, f"the fix itself failed: {type(error).__name__}: {error}")
    tree.take_back(name)
    return result


def _make(fix: Fix, tree: _Tree) -> bool:
    """Request the edits of a fix; whether it is needed. The caller drops the edits of a fix that is not.

    Raises:
        NoMatch: the code of an edit is absent where the stated releases have it, or only a part of the fix is there.
    """
    found: dict[Edit, _Found] = {}
    for edit in fix.edits:
        if edit.ours_alone if tree.for_upstream else edit.upstream_alone:
            continue
        try:
            found[edit] = _make_one(fix, edit, tree)
        except NoMatch as error:
            if isinstance(error, UnreadableSource) or _is_expected(fix, edit, tree):
                raise
            if not edit.releases and not edit.independent:
                return False
            found[edit] = _Found.NOTHING
    code, fixed = (
        [edit for edit in found if found[edit] is kind and not edit.independent] for kind in (_Found.CODE, _Found.FIXED)
    )
    if _Found.CODE not in found.values():
        return False
    if code and fixed:
        has, lacks = (", ".join(f"{e.function.__name__} in {e.module}" for e in edits) for edits in (fixed, code))
        raise NoMatch(f"a part of this fix is there already ({has}), missing: {lacks}")
    return True


def _is_expected(fix: Fix, edit: Edit, tree: _Tree) -> bool:
    """Whether this tree must have the code of an edit, by the stated releases and the packages that it has."""
    if not contains(tree.root, root_of(edit.module)):  # megatron.core alone, or megatron.training from elsewhere
        return False
    return have_code(edit.releases or fix.releases, tree.package, tree.version)


def _make_one(fix: Fix, edit: Edit, tree: _Tree) -> _Found:
    """Request one edit, or nothing. Raises NoMatch, with the file's path."""
    path = module_path(tree.root, edit.module)
    try:
        source = tree.source(edit.module, path)
        count, source.fix = len(source.edits), fix.name
        source.request(edit.function)
        return _Found.CODE if len(source.edits) > count else _Found.NOTHING
    except NotNeeded:
        return _Found.FIXED
    except NoMatch as error:
        raise type(error)(f"{path}: {error.text}", error.near) from error
