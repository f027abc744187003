"""The definition of a fix: its name, upstream links, and functions that edit upstream source."""

import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt_patches.engine.registry import EVERYTHING, TARGETS, folder
from ckpt_patches.engine.source import Ranges, Source

EditFunction = Callable[[Source], None]


def numbers(version: str) -> tuple[int, ...]:
    """The release numbers of a version, such as (0, 16, 1) of 0.16.1rc2; empty if it begins with none."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


@dataclass(frozen=True)
class Edit:
    """One edit of one upstream module.

    The function requests edits from the source. It raises `NotNeeded` if the source has its code, or `NoMatch`. A
    function that requests none checks that the fix is for this code.
    """

    module: str
    function: EditFunction
    releases: Ranges  # that have its code, if not all of the fix's do
    independent: bool  # correct without the fix's other edits
    ours_alone: bool  # omitted from a diff for upstream


@dataclass(frozen=True)
class Fix:
    """One fix: all of its edits are made, or none."""

    module_name: str  # its last part is the fix's name
    upstream: tuple[str, ...] = ()  # issues and pull requests
    test: str = ""  # where the upstream-style regression test goes in an upstream checkout
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
        return TARGETS[EVERYTHING[self.name][0]]

    def affects(self, version: str) -> bool:
        """Whether a release has the bug; only known for those in `ckpt_patches.engine.releases`."""
        return any(numbers(first) <= numbers(version) <= numbers(last) for first, last in self.releases)

    def edit(
        self, *modules: str, releases: Ranges = (), independent: bool = False, ours_alone: bool = False
    ) -> Callable[[EditFunction], EditFunction]:
        """Decorate a function that edits each of these modules separately.

        Where an edit's code is absent in one of the fix's releases, or of the edit's own `releases`, the fix does not
        match. If a tree has some edits of a fix but not the others, it does not either: a part of it may be worse than
        nothing. Edits marked `independent` are correct alone. Edits marked `ours_alone` are only for patching a
        release, and not part of a diff for upstream.
        """

        def register(function: EditFunction) -> EditFunction:
            self.edits.extend(Edit(module, function, releases, independent, ours_alone) for module in modules)
            return function

        return register


def package_of(name: str) -> str:
    """The upstream package that a fix is for."""
    return TARGETS[EVERYTHING[name][0]]


def path_of(name: str) -> str:
    """The file of a fix."""
    return os.path.join(folder(package_of(name)), f"{name}.py")


def sentence(name: str) -> str:
    """One sentence about what a fix does: the first line of its file."""
    with open(path_of(name), encoding="utf-8") as file:
        return file.readline().strip().strip('"')


def load(name: str) -> Fix:
    """Load a fix from its file by path. This works in an install and a checkout, and never imports `megatron`."""
    path = path_of(name)
    spec = importlib.util.spec_from_file_location(f"ckpt_patches.fixes.{name}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"expected the fix {name} in {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fix = module.fix
    assert isinstance(fix, Fix)
    return fix
