"""The definition of a fix: its name, upstream links, and functions that edit upstream source."""

import functools
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import NamedTuple

from ckpt_patches.engine.registry import PACKAGES, PART_OF, folder, root_of
from ckpt_patches.engine.source import Ranges, Source

EditFunction = Callable[[Source], None]


def numbers(version: str) -> tuple[int, ...]:
    """The release numbers of a version, such as (0, 16, 1) of 0.16.1rc2; empty if it begins with none."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


class Edit(NamedTuple):
    """One edit of one upstream module.

    The function requests edits from the source. It raises `NotNeeded` if the source has its code, or `NoMatch`. A
    function that requests none checks that the fix is for this code.
    """

    module: str
    function: EditFunction
    releases: Ranges  # that have its code, if not all of the fix's do
    independent: bool  # correct without the fix's other edits
    ours_alone: bool  # omitted from a diff for upstream
    upstream_alone: bool  # only in a diff for upstream: here, something else does what it does


@dataclass(frozen=True, eq=False, repr=False)  # which takes a third of the time
class Fix:
    """One fix: all of its edits are made, or none."""

    module_name: str  # its last part is the fix's name
    upstream: tuple[str, ...] = ()  # issues and pull requests
    test: str = ""  # where its test for upstream goes in a checkout; empty if the newest release does not need the fix
    depends_on: tuple[str, ...] = ()  # fixes that this one, or its test, needs
    symptom: str = ""  # what a user sees, a phrase of at most 80 characters
    releases: Ranges = ()  # with the bug: where its code is absent in them, the fix does not match
    stacks: str = ""  # the format, optimizer or setting that the bug needs
    silent: bool = False  # in at least one case the state is wrong without an error
    switch: str = ""  # not a fix: only CKPT_PATCHES_<SWITCH> activates it
    edits: list[Edit] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.module_name.rpartition(".")[2]

    @property
    def package(self) -> str:
        """The upstream package that the fix edits, such as `megatron.core`."""
        return PART_OF.get(self.root, self.root)

    @property
    def root(self) -> str:
        """The root of the modules that it edits, such as `megatron.training`."""
        return root_of(self.edits[0].module)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that it edits or looks at. A package's `__init__` is no name that an import uses."""
        return tuple(dict.fromkeys(edit.module for edit in self.edits if not edit.module.endswith(".__init__")))

    @property
    def is_for_upstream_alone(self) -> bool:
        """Whether it is only in patches for upstream: neither the hook nor `apply` makes its edits."""
        return all(edit.upstream_alone for edit in self.edits)

    @property
    def affected(self) -> str:
        """The package and its releases with the bug, for people."""
        ranges = (first if first == last else f"{first} \N{EN DASH} {last}" for first, last in self.releases)
        return f"{PACKAGES[self.package].title} {', '.join(ranges)}".strip()

    def affects(self, version: str) -> bool:
        """Whether a release has the bug; only known for those in `ckpt_patches.engine.releases`."""
        return any(numbers(first) <= numbers(version) <= numbers(last) for first, last in self.releases)

    def edit(
        self,
        *modules: str,
        releases: Ranges = (),
        independent: bool = False,
        ours_alone: bool = False,
        upstream_alone: bool = False,
    ) -> Callable[[EditFunction], EditFunction]:
        """Decorate a function that edits each of these modules separately.

        Where an edit's code is absent in one of the fix's releases, or of the edit's own `releases`, the fix does not
        match. If a tree has some edits of a fix but not the others, it does not either: a part of it may be worse than
        nothing. Edits marked `independent` are correct alone. Edits marked `ours_alone` are only for patching a
        release, and not part of a diff for upstream; those marked `upstream_alone` are only part of that.
        """

        def register(function: EditFunction) -> EditFunction:
            flags = (independent, ours_alone, upstream_alone)
            self.edits.extend(Edit(module, function, releases, *flags) for module in modules)
            return function

        return register


# The fixes are found by listing their folders: a file that defines a `fix` is one.


@functools.cache
def _paths(package: str) -> dict[str, str]:
    """By name, the files in the folder of an upstream package's fixes."""
    place = folder(package)
    return {name[:-3]: os.path.join(place, name) for name in sorted(os.listdir(place)) if name.endswith(".py")}


@functools.cache
def fixes_of(package: str) -> dict[str, Fix]:
    """The fixes of an upstream package by name, in the order of application: alphabetical, behind their dependencies.

    Those with a switch come last: they decorate what the others have edited.
    """
    found = {name: fix for name, path in _paths(package).items() if (fix := _load(name, path)) is not None}
    ordered: dict[str, Fix] = {}

    def add(fix: Fix) -> None:
        for other in fix.depends_on:
            add(found[other])
        ordered[fix.name] = fix

    for fix in sorted(found.values(), key=lambda fix: bool(fix.switch)):
        if fix.name not in ordered:
            add(fix)
    return ordered


def _load(name: str, path: str) -> Fix | None:
    """Load a fix from its file, which works in an install and a checkout, and never imports `megatron`.

    The other files, which bind no `fix`, do not run.
    """
    module = ModuleType(f"ckpt_patches.fixes.{name}")
    code = SourceFileLoader(module.__name__, path).get_code(module.__name__)
    assert code is not None
    if "fix" not in code.co_names:
        return None
    module.__file__ = path
    exec(code, module.__dict__)
    fix = module.fix
    assert isinstance(fix, Fix)
    return fix


@functools.cache
def targets(root: str) -> dict[str, None]:
    """The modules below one of the roots that a fix edits or looks at."""
    fixes = fixes_of(PART_OF.get(root, root)).values()
    return dict.fromkeys(module for fix in fixes if fix.root == root for module in fix.modules)


def every_fix() -> dict[str, Fix]:
    """All fixes, without those of a switch."""
    return {name: fix for package in PACKAGES for name, fix in fixes_of(package).items() if not fix.switch}


def load(name: str) -> Fix:
    """The fix of this name.

    Raises:
        KeyError: there is none.
    """
    return fixes_of(package_of(name))[name]


def with_dependencies(names: Iterable[str]) -> set[str]:
    """These fixes and all their dependencies."""
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += load(name).depends_on
    return found


def package_of(name: str) -> str:
    """The upstream package that a fix is for. Raises KeyError for a name of no fix."""
    for package in PACKAGES:
        if name in _paths(package):
            return package
    raise KeyError(name)


def path_of(name: str) -> str:
    """The file of a fix."""
    return _paths(package_of(name))[name]


def sentence(name: str) -> str:
    """One sentence about what a fix does: the first line of its file."""
    with open(path_of(name), encoding="utf-8") as file:
        return file.readline().strip().strip('"')
