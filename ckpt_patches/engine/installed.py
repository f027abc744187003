"""Locate the upstream packages and find their releases, without importing them."""

import os
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from ckpt_patches import ROOTS
from ckpt_patches.engine.registry import DEEPSPEED, TORCH

DISTRIBUTIONS = ROOTS
STATE_FOLDER = ".ckpt-patches"


def absolute(path: str) -> str:
    """An absolute path. What is before a `..` may be a link: then the path is resolved on the disk, as imports do."""
    folder, name = os.path.split(path)
    if os.pardir not in path.split(os.sep):
        return os.path.abspath(path)
    return os.path.realpath(path) if name == os.pardir else os.path.join(os.path.realpath(folder), name)


def contains(root: str | Path, package: str) -> bool:
    """Whether a tree contains an upstream package."""
    return Path(root, *package.split(".")).is_dir()


def state_folder(root: str | Path, package: str) -> Path:
    """The folder for the original files and the state of a package that is edited in place."""
    return Path(root, STATE_FOLDER, package)


def version_in(root: str | Path, package: str) -> str:
    """The release of the package in a tree, read from its files; '?' if unknown."""
    if package.startswith("megatron."):
        found = _core_version(Path(root))
    elif package == DEEPSPEED:
        found = _assigned_version(Path(root), "deepspeed/git_version_info_installed.py", "version")
    elif package == TORCH:
        found = _assigned_version(Path(root), "torch/version.py", "__version__")  # "2.9.0+cpu"
    else:
        found = ""
    return found or _recorded_version(Path(root), DISTRIBUTIONS[package]) or "?"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _core_version(root: Path) -> str:
    """megatron/core/package_info.py assigns MAJOR, MINOR, PATCH and PRE_RELEASE ('rc0', '')."""
    text = _read(root / "megatron/core/package_info.py")
    values = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE)\s*=\s*['\"]?(\w*)", text, re.M))
    if not {"MAJOR", "MINOR", "PATCH"} <= values.keys():
        return ""
    return f"{values['MAJOR']}.{values['MINOR']}.{values['PATCH']}{values.get('PRE_RELEASE', '')}"


def _assigned_version(root: Path, file: str, name: str) -> str:
    """The version that a file of an installed package assigns to a name; a checkout has version.txt."""
    found = re.search(rf"^{name}\s*=\s*['\"]([^'\"]+)", _read(root / file), re.M)
    return found[1] if found else _read(root / "version.txt").strip()


def _recorded_version(root: Path, distribution: str) -> str:
    """The version in the name of the installed package's folder `name-version.dist-info`."""
    found = sorted(root.glob(f"{distribution.replace('-', '_')}-*.dist-info"))
    return found[0].stem.partition("-")[2] if found else ""


def find_spec(name: str, path: Sequence[str] | None = None) -> ModuleSpec | None:
    """The spec that an import would find first. Queries the finders and imports nothing, not even a parent package."""
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = find_spec(name, path) if find_spec else None
        if spec is not None:
            return spec
    return None


def locate(package: str) -> Path | None:
    """The tree that `import <package>` would load from in this environment; None if it is not installed.

    A package folder without a module is a remnant of an uninstall. A parent folder may be shared by several packages.
    """
    path: Sequence[str] | None = None
    parts = package.split(".")
    for depth in range(1, len(parts) + 1):
        try:
            spec = find_spec(".".join(parts[:depth]), path)
        except KeyError:  # from Python, for a namespace package whose parent is not imported
            return None
        if spec is None or spec.submodule_search_locations is None:
            return None
        path = list(spec.submodule_search_locations)
        if depth == len(parts) and spec.origin is None and not any(Path(path[0]).rglob("*.py")):
            return None
    folder = Path(os.path.abspath(path[0] if path else ""))
    return folder.parents[len(parts) - 1]
