"""What a fix is: its name, where it comes from, and functions that edit upstream source."""

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt_patches.engine.registry import EVERYTHING, PLUGINS, TARGETS, folder
from ckpt_patches.engine.source import Source

EditFunction = Callable[[Source], None]


def numbers(version: str) -> tuple[int, ...]:
    """A release such as 0.16.1 in the form that orders releases."""
    return tuple(map(int, version.split(".")))


@dataclass(frozen=True)
class Edit:
    """One edit of one upstream module.

    The function asks the source for edits, or raises `AlreadyThere` where upstream has what it brings, or `NoMatch`.
    """

    module: str
    function: EditFunction
    optional: bool  # the module need not exist: releases moved the code between modules
    independent: bool  # right without the fix's other edits: some releases have it alone
    ours_alone: bool  # left out of a diff for upstream


@dataclass(frozen=True)
class Fix:
    """One fix: all of its edits are made, or none."""

    module_name: str  # the fix's file is its name
    upstream: tuple[str, ...] = ()  # issues and pull requests
    test: str = ""  # where the upstream-style regression test goes in an upstream checkout
    depends_on: tuple[str, ...] = ()  # fixes without which this one, or its test, does not work
    symptom: str = ""  # what a user sees, a fragment of at most 80 characters
    releases: tuple[tuple[str, str], ...] = ()  # inclusive ranges with the bug; documentation, never the gate
    stacks: str = ""  # the format, optimizer or setting that the bug needs
    silent: bool = False  # in at least one case the state is wrong without an error
    stages: tuple[str, ...] = ()  # of a save, a conversion or a load, where the bug sits: tests/map_page.py
    requires: tuple[str, ...] = ()  # versions of packages without which it is not needed: `torch>=2.8,<2.10`
    concerns: str = ""  # module without which the fix is not for this release
    off_because: str = ""  # off by default, and why: active where CKPT_PATCHES_ENABLE names it
    switch: str = ""  # not a fix: active only where CKPT_PATCHES_<SWITCH> asks for it
    where: Callable[[Source], bool] | None = None  # of that module's source: whether it is
    edits: list[Edit] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.module_name.rpartition(".")[2]

    @property
    def package(self) -> str:
        """The upstream package that it edits, such as `megatron.core`."""
        return TARGETS[EVERYTHING[self.name][0]]

    def affects(self, version: str) -> bool:
        """Whether a release has the bug; known for those in `ckpt_patches.engine.releases`."""
        return any(numbers(first) <= numbers(version) <= numbers(last) for first, last in self.releases)

    def edit(
        self, *modules: str, optional: bool = False, independent: bool = False, ours_alone: bool = False
    ) -> Callable[[EditFunction], EditFunction]:
        """Decorate a function that edits these modules, each on its own.

        Where some edits of a fix are there already, and others are not, it does not match: a part of it may be worse
        than nothing. Those marked `independent` are right alone. Those marked `ours_alone` are of use where fixes are
        laid over a release, and no part of a diff for upstream.
        """

        def register(function: EditFunction) -> EditFunction:
            self.edits.extend(Edit(module, function, optional, independent, ours_alone) for module in modules)
            return function

        return register


def package_of(name: str) -> str:
    """The upstream package that a fix is for."""
    return TARGETS[EVERYTHING[name][0]]


def path_of(name: str) -> str:
    """The file of a fix."""
    if name in PLUGINS:
        return str(sys.modules[PLUGINS[name].module_name].__file__)
    return os.path.join(folder(package_of(name)), f"{name}.py")


def sentence(name: str) -> str:
    """What a fix does: the first line of its file."""
    with open(path_of(name), encoding="utf-8") as file:
        return file.readline().strip().strip('"')


def load(name: str) -> Fix:
    """Load a fix from its file, by path: the same in an install and in a checkout, and `megatron` is never imported."""
    if name in PLUGINS:
        plugin: Fix = PLUGINS[name]
        return plugin
    path = path_of(name)
    spec = importlib.util.spec_from_file_location(f"ckpt_patches.fixes.{name}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"expected the fix {name} in {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fix = module.fix
    assert isinstance(fix, Fix)
    return fix
