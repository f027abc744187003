"""Decide what every fix does in one tree with an upstream package. Reads files, changes nothing.

A tree is the folder that contains the package: site-packages, a `--target` folder or a checkout.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import CodeType

from ckpt_patches.engine.fix import Edit, Fix, fixes_of, load
from ckpt_patches.engine.installed import contains, version_in
from ckpt_patches.engine.registry import root_of
from ckpt_patches.engine.releases import have_code, is_too_old
from ckpt_patches.engine.source import NoMatch, NotNeeded, Source, UnreadableSource
from ckpt_patches.errors import UserError
from ckpt_patches.runtime.pause import without_garbage_collection, without_syntax_warnings


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


@dataclass(frozen=True)
class FixResult:
    """The outcome of one fix."""

    name: str
    outcome: Outcome
    reason: str = ""  # for NO_MATCH: file, expected and found code
    unreadable: bool = False  # NO_MATCH because the file is unreadable, not UTF-8, or does not parse
    modules: tuple[str, ...] = ()  # for APPLIES: the edited modules
    functions: tuple[tuple[str, str], ...] = ()  # for APPLIES: module and name of the functions it edits or adds


@dataclass(frozen=True)
class FilePlan:
    """The edited text of one upstream file."""

    module: str
    path: str
    original: bytes
    patched: bytes
    code: CodeType  # `patched`, compiled
    fixes: tuple[str, ...]  # the fixes that edit it
    functions: dict[str, tuple[str, ...]]  # by name, also `Class.name`: the fixes that edit or add that function


@dataclass(frozen=True)
class TreePlan:
    """The outcome of every fix in one tree, and the edited files."""

    package: str
    root: str
    results: tuple[FixResult, ...]
    files: dict[str, FilePlan]  # by module
    texts: dict[str, bytes]  # by module, the digest of every text that was read; empty if there is no file

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


def text_digest(data: bytes) -> bytes:
    """A digest for comparing texts, also between processes."""
    return hashlib.blake2b(data, digest_size=16).digest()


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
    """The sources of a tree, each read and parsed once.

    `originals` (by path) replace files that were edited in place; `unavailable` has the reason why a fix must not edit
    a module.
    """

    def __init__(
        self,
        root: str,
        package: str,
        originals: Mapping[str, bytes],
        unavailable: Mapping[tuple[str, str], str],
        *,
        for_upstream: bool = False,
    ) -> None:
        self.root = root
        self.package = package
        self.version = version_in(root, package)
        self.for_upstream = for_upstream
        self.originals = originals
        self.unavailable = unavailable
        self.sources: dict[str, Source | None] = {}

    def source(self, module: str) -> Source | None:
        if module not in self.sources:
            path = module_path(self.root, module)
            try:
                expected = partial(have_code, package=self.package, version=self.version)  # no cycle of references
                self.sources[module] = Source(self._read(path), path, expected)
            except FileNotFoundError:
                if os.path.exists(path + "c"):
                    raise NoMatch("no source, only bytecode") from None
                self.sources[module] = None
            except OSError as error:
                raise UnreadableSource(f"it cannot be read: {error.strerror}") from error
        return self.sources[module]

    def _read(self, path: str) -> bytes:
        if path in self.originals:
            return self.originals[path]
        with open(path, "rb") as file:
            return file.read()

    def texts(self) -> dict[str, bytes]:
        return {module: text_digest(source.data) if source else b"" for module, source in self.sources.items()}

    def marks(self) -> dict[str, int]:
        """The number of edits requested so far, by module."""
        return {module: len(source.edits) for module, source in self.sources.items() if source}

    def edited_since(self, marks: Mapping[str, int]) -> list[str]:
        """The modules with edits requested since `marks`."""
        return [module for module, count in self.marks().items() if count > marks.get(module, 0)]

    def functions_edited_since(self, marks: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """The module and name of each function that was edited or added since `marks`."""
        for module, source in self.sources.items():
            edits = source.edits[marks.get(module, 0) :] if source else []
            for name in source.functions_of(edits) if source and edits else ():
                yield module, name

    def take_back(self, marks: Mapping[str, int]) -> None:
        """Drop the edits requested since `marks`."""
        for module, source in self.sources.items():
            if source:
                del source.edits[marks.get(module, 0) :]


@without_garbage_collection()  # until the syntax trees are freed
@without_syntax_warnings()
def plan_tree(
    root: str,
    package: str,
    names: Iterable[str] | None = None,
    originals: Mapping[str, bytes] | None = None,
    unavailable: Mapping[tuple[str, str], str] | None = None,
    *,
    for_upstream: bool = False,
) -> TreePlan:
    """Decide what these fixes (None: all fixes of the package) do in a tree.

    Args:
        root: the tree.
        package: such as `megatron.core`.
        names: the fixes, in order.
        originals: by path, the original text of files that are already edited on disk.
        unavailable: by fix and module, why the fix cannot edit the module here; if it would, it does not match.
        for_upstream: omit the edits that do not belong in a patch for upstream.
    """
    tree = _Tree(root, package, originals or {}, unavailable or {}, for_upstream=for_upstream)
    names = fixes_for(package) if names is None else list(names)
    results = [_try(name, tree) for name in names]
    files, defect = _compile(tree, results)
    if defect:
        results = _one_by_one(names, tree)
        files, _ = _compile(tree, results)
    return TreePlan(package, root, tuple(results), files, tree.texts())


def _compile(tree: _Tree, results: Sequence[FixResult]) -> tuple[dict[str, FilePlan], str]:
    """The edited files; and the defect of one of them, if the edits together do not give a valid program."""
    files: dict[str, FilePlan] = {}
    for module, source in tree.sources.items():
        if source is None or not source.edits:
            continue
        patched = source.edited()
        try:
            code = compile(patched, source.path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            return {}, f"{source.path}: the edited source does not compile: {error}"
        fixes = tuple(result.name for result in results if module in result.modules)
        functions: dict[str, tuple[str, ...]] = {}
        for result in results:
            for name in (name for of, name in result.functions if of == module):
                functions[name] = (*functions.get(name, ()), result.name)
        files[module] = FilePlan(module, source.path, source.data, patched, code, fixes, functions)
    return files, ""


def _one_by_one(names: Iterable[str], tree: _Tree) -> list[FixResult]:
    """Try each fix on top of the valid ones before it, so that a bad edit rejects only its own fix."""
    tree.take_back({})
    results: list[FixResult] = []
    for name in names:
        before = tree.marks()
        result = _try(name, tree)
        defect = _compile(tree, results)[1] if result.outcome is Outcome.APPLIES else ""
        if defect:
            tree.take_back(before)
            result = FixResult(name, Outcome.NO_MATCH, defect)
        results.append(result)
    return results


def _try(name: str, tree: _Tree) -> FixResult:
    """Make all edits of a fix, or none."""
    before = tree.marks()
    try:
        fix = load(name)
        if is_too_old(tree.package, tree.version) and not fix.affects(tree.version):
            return FixResult(name, Outcome.NOT_NEEDED, "the release is older than those that the fix is for")
        if _make(fix, tree):
            modules, functions = tree.edited_since(before), tree.functions_edited_since(before)
            return FixResult(name, Outcome.APPLIES, modules=tuple(modules), functions=tuple(functions))
        is_no_edit_ours = not tree.for_upstream and all(edit.upstream_alone for edit in fix.edits)
        result = FixResult(name, Outcome.NOT_NEEDED, "only in patches for upstream" if is_no_edit_ours else "")
    except NoMatch as error:
        result = FixResult(name, Outcome.NO_MATCH, str(error), isinstance(error, UnreadableSource))
    except Exception as error:  # a defect of this fix must not affect the others
        result = FixResult(name, Outcome.NO_MATCH, f"the fix itself failed: {type(error).__name__}: {error}")
    tree.take_back(before)
    return result


def _make(fix: Fix, tree: _Tree) -> bool:
    """Request the edits of a fix; whether it is needed. The caller drops the edits of a fix that is not.

    Raises:
        NoMatch: the code of an edit is absent where the stated releases have it, or only a part of the fix is there.
    """
    wanted = [edit for edit in fix.edits if not (edit.ours_alone if tree.for_upstream else edit.upstream_alone)]
    before, found = tree.marks(), {}
    for edit in wanted:
        marks = tree.marks()
        try:
            found[edit] = _make_one(fix, edit, tree)
        except NoMatch as error:
            if isinstance(error, UnreadableSource) or _is_expected(fix, edit, tree):
                raise
            if not edit.releases and not edit.independent:
                return False
            tree.take_back(marks)
            found[edit] = _Found.NOTHING
    if not tree.edited_since(before):
        return False
    code, fixed = (
        [edit for edit in found if found[edit] is kind and not edit.independent] for kind in (_Found.CODE, _Found.FIXED)
    )
    if code and fixed:
        has, lacks = (", ".join(f"{e.function.__name__} in {e.module}" for e in edits) for edits in (fixed, code))
        raise NoMatch(f"a part of this fix is there already ({has}), missing: {lacks}")
    return True


def _is_expected(fix: Fix, edit: Edit, tree: _Tree) -> bool:
    """Whether this tree must have the code of an edit, by the stated releases and the packages that it has."""
    if not contains(tree.root, root_of(edit.module)):  # megatron.core alone, or megatron.training from elsewhere
        return False
    return have_code(edit.releases or fix.releases, tree.package, tree.version)


def _source(tree: _Tree, module: str) -> Source | None:
    with _said_of(module_path(tree.root, module)):
        return tree.source(module)


def _make_one(fix: Fix, edit: Edit, tree: _Tree) -> _Found:
    source = _source(tree, edit.module)
    if source is None:
        raise NoMatch(f"{module_path(tree.root, edit.module)}: there is no such file")
    with _said_of(source.path):
        before = len(source.edits)
        try:
            edit.function(source)
        except NotNeeded:
            del source.edits[before:]
            return _Found.FIXED
        if len(source.edits) > before and (fix.name, edit.module) in tree.unavailable:
            raise NoMatch(tree.unavailable[fix.name, edit.module])
        return _Found.CODE if len(source.edits) > before else _Found.NOTHING


@contextmanager
def _said_of(path: str) -> Iterator[None]:
    """Add the file's path to a NoMatch, of either class."""
    try:
        yield
    except NoMatch as error:
        raise type(error)(f"{path}: {error.text}", error.near) from error
