"""Every fix and the upstream modules it edits, in the order of application.

The registry is read when the first module of one of these packages is imported. It lists no fix by hand: fixes are
found in their folders, when a wheel is built or, in a checkout, at this point.
"""

import os

from ckpt_patches import ROOTS

CORE = "megatron.core"
TRAINING = "megatron.training"
DEEPSPEED = "deepspeed"
NVRX = "nvidia_resiliency_ext"
APEX = "apex"
TORCH = "torch.distributed.checkpoint"

# The folder of an upstream package's fixes, next to this package: its name in an install and in a checkout.
FOLDERS = {
    CORE: ("megatron_patches", "megatron/patches"),
    DEEPSPEED: ("deepspeed_patches",),
    NVRX: ("nvrx_patches",),
    APEX: ("apex_patches",),
    TORCH: ("torch_patches",),
}

# A root whose modules ship with another root: in the same checkout and, since megatron-core 0.17, in the same wheel.
# The fixes share one folder; the import hook plans them separately, as most programs import only megatron.core.
PART_OF = {TRAINING: CORE}


def folder(package: str) -> str:
    """The folder with an upstream package's fixes."""
    # An editable install that is older than a folder has no link to it: then use the checkout's folder.
    packages = [os.path.dirname(os.path.dirname(path(__file__))) for path in (os.path.abspath, os.path.realpath)]
    folders = [os.path.join(os.path.dirname(beside), name) for beside in packages for name in FOLDERS[package]]
    return next(filter(os.path.isdir, folders), folders[0])


def _found() -> "tuple[dict[str, tuple[str, ...]], dict[str, dict[str, tuple[str, ...]]]]":
    try:
        from ckpt_patches.engine import index  # type: ignore[attr-defined,unused-ignore]
    except ImportError:
        from ckpt_patches.engine.discovery import find_fixes

        return find_fixes(map(folder, FOLDERS))
    return index.FIXES, index.SWITCHED


# FIXES: by fix, the modules it edits or reads, all in one upstream package. SWITCHED: by switch (CKPT_PATCHES_<NAME>),
# edits that are not fixes and are made only if it is set; they come last and decorate what the fixes have edited.
FIXES, SWITCHED = _found()
EVERYTHING: dict[str, tuple[str, ...]] = {**FIXES}
for _parts in SWITCHED.values():
    EVERYTHING |= _parts


def root_of(module: str) -> str:
    """The root in `ROOTS` that contains a module; empty if none does."""
    return max((root for root in ROOTS if f"{module}.".startswith(f"{root}.")), key=len, default="")


def package_with(module: str) -> str:
    """The upstream package whose fixes cover a module; empty if none does."""
    root = root_of(module)
    return PART_OF.get(root, root)


# The package of each upstream module. The import hook looks up every imported name here.
TARGETS = {module: package_with(module) for modules in EVERYTHING.values() for module in modules}
