"""Every fix and the upstream modules it edits, in the order in which fixes are applied.

Read when the first module of one of these packages is imported. Nothing is listed here: the fixes are found in their
folders, when a wheel is built or, in a checkout, now. Those of other distributions come later: `plugins`.
"""

import os

from ckpt_patches import ROOTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CORE = "megatron.core"
TRAINING = "megatron.training"
DEEPSPEED = "deepspeed"
NVRX = "nvidia_resiliency_ext"
APEX = "apex"

# Folder of the fixes of an upstream package, beside this package: as it is installed, or as it is in a checkout.
FOLDERS = {
    CORE: ("megatron_patches", "megatron/patches"),
    DEEPSPEED: ("deepspeed_patches",),
    NVRX: ("nvrx_patches",),
    APEX: ("apex_patches",),
}

# A root with modules of another one's package: in the same checkout and, since megatron-core 0.17, in the same wheel.
# The fixes are in one folder; the import hook plans them apart, as most programs import the other one alone.
PART_OF = {TRAINING: CORE}


def folder(package: str) -> str:
    """The folder with an upstream package's fixes."""
    # An editable install that was made before a folder came has no link to it yet: then the checkout's own.
    packages = [os.path.dirname(os.path.dirname(path(__file__))) for path in (os.path.abspath, os.path.realpath)]
    folders = [os.path.join(os.path.dirname(beside), name) for beside in packages for name in FOLDERS[package]]
    return next(filter(os.path.isdir, folders), folders[0])


def _found() -> "tuple[dict[str, tuple[str, ...]], dict[str, dict[str, tuple[str, ...]]], dict[str, str]]":
    try:
        from ckpt_patches.engine import index  # type: ignore[attr-defined,unused-ignore]
    except ImportError:
        from ckpt_patches.engine.discovery import find_fixes

        return find_fixes(map(folder, FOLDERS))
    return index.FIXES, index.SWITCHED, index.OFF_BY_DEFAULT


# Fix: the modules it edits or looks at, all of one upstream package. And by switch (CKPT_PATCHES_<NAME>) what is not a
# fix, and edits upstream only where that is set: applied last, it decorates what the fixes have edited.
# Of the fixes, those that are left out where CKPT_PATCHES_ENABLE does not name them, and why.
FIXES, SWITCHED, OFF_BY_DEFAULT = _found()
EVERYTHING: dict[str, tuple[str, ...]] = {**FIXES}
for _parts in SWITCHED.values():
    EVERYTHING |= _parts


def root_of(module: str) -> str:
    """The one of `ROOTS` that a module is of; empty if it is of none."""
    return max((root for root in ROOTS if f"{module}.".startswith(f"{root}.")), key=len, default="")


def package_with(module: str) -> str:
    """The upstream package with a module's fixes; empty if there are none for it."""
    root = root_of(module)
    return PART_OF.get(root, root)


# Upstream module: its package. What the import hook looks every name up in.
TARGETS = {module: package_with(module) for modules in EVERYTHING.values() for module in modules}

# The fixes of other distributions, by their names, and whether they have been looked for.
PLUGINS: "dict[str, Any]" = {}
has_plugins = False


def packages() -> list[str]:
    """The upstream packages that there are fixes for."""
    return list(dict.fromkeys((*FOLDERS, *TARGETS.values())))
