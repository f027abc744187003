"""Where the upstream packages are, and which releases they are. Nothing of them is imported."""

import os
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from ckpt_patches.engine.registry import CORE, DEEPSPEED

DISTRIBUTIONS = {CORE: "megatron-core", DEEPSPEED: "deepspeed"}


def contains(root: str | Path, package: str) -> bool:
    """Whether a tree holds an upstream package."""
    return Path(root, *package.split(".")).is_dir()


def version_in(root: str | Path, package: str) -> str:
    """The release of the package in a tree, from the package's own files; '?' where they do not say."""
    return (_core_version if package == CORE else _deepspeed_version)(Path(root)) or "?"


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


def _deepspeed_version(root: Path) -> str:
    """The installed package has git_version_info_installed.py, a checkout version.txt."""
    found = re.search(r"^version\s*=\s*['\"]([^'\"]+)", _read(root / "deepspeed/git_version_info_installed.py"), re.M)
    return found[1] if found else _read(root / "version.txt").strip()


def find_spec(name: str, path: Sequence[str] | None = None) -> ModuleSpec | None:
    """What an import would find first; asks the finders, imports nothing (not even a parent package)."""
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = find_spec(name, path) if find_spec else None
        if spec is not None:
            return spec
    return None


def locate(package: str) -> Path | None:
    """The tree that `import <package>` would load from in this environment; None if it is not installed.

    A folder without `__init__.py` is what an uninstall has left there; one above the package may be shared by several.
    """
    path: Sequence[str] | None = None
    parts = package.split(".")
    for depth in range(1, len(parts) + 1):
        try:
            spec = find_spec(".".join(parts[:depth]), path)
        except KeyError:  # of Python's: a folder alone, in one whose package is not imported
            return None
        if spec is None or spec.submodule_search_locations is None or (depth == len(parts) and spec.origin is None):
            return None
        path = list(spec.submodule_search_locations)
    folder = Path(os.path.abspath(path[0] if path else ""))
    return folder.parents[len(parts) - 1]
