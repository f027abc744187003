"""Select the trees that a command works on: the one that the user names, or those that this environment imports."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_patches.engine.fix import every_fix, package_of
from ckpt_patches.engine.installed import absolute, contains, locate
from ckpt_patches.engine.plan import fixes_for
from ckpt_patches.engine.registry import PACKAGES
from ckpt_patches.errors import UserError, unknown


@dataclass(frozen=True)
class Selection:
    """One upstream package in one tree, and the requested fixes."""

    package: str
    root: str
    names: tuple[str, ...]


def select(names: Sequence[str], tree: str | None) -> list[Selection]:
    """The trees and fixes a command is for.

    Raises:
        UserError: an unknown fix, a tree without the package, no package installed.
    """
    known = every_fix() if names else {}
    for name in names:
        if name not in known:
            raise UserError(unknown("fix", name, known, "ckpt-patches list"))
    wanted = [p for p in PACKAGES if not names or any(package_of(n) == p for n in names)]
    found = [(package, root) for package in wanted if (root := root_of(package, tree)) is not None]
    missing = [package for package in wanted if package not in dict(found)]
    if not found or (names and missing):
        folders = " or ".join(p.replace(".", "/") + "/" for p in missing)
        where = tree if tree is not None else "the packages that this Python imports"
        raise UserError(f"expected {folders} in {where}, found none; name a tree that has it with --tree PATH")
    return [
        Selection(package, root, tuple(n for n in fixes_for(package) if not names or n in names))
        for package, root in found
    ]


def root_of(package: str, tree: str | None) -> str | None:
    """The named tree or the one that this Python imports an upstream package from; None if it lacks the package.

    Raises:
        UserError: the named tree is not a folder.
    """
    if tree is None:
        found = locate(package)
        return str(found) if found else None
    if not Path(tree).is_dir():
        raise UserError(f"expected a folder with one of the packages, found no folder {tree}")
    return absolute(tree) if contains(tree, package) else None
