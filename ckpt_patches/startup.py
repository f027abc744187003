"""Functions for programs: install and uninstall the import hook, check and report which fixes run.

The hook itself starts in the package's `__init__`, which every interpreter loads at its start; this module is not.
"""

import os

import ckpt_patches
from ckpt_patches import PatchFinder


def install() -> PatchFinder | None:
    """Put the finder in front of the meta path, unless one is there, and return it; None with `CKPT_PATCHES=off`.

    For environments that read no .pth file (`pip install --target`, `python -S`): call it before the first import
    of megatron or deepspeed. A fix is active in none of its modules if one of them is imported already, with a warning.

    Raises:
        StrictModeError: in strict mode, there is such a fix. The finder is installed.
    """
    return ckpt_patches.start()


def verify() -> None:
    """Warn on rank 0 about needed fixes that do not run, once. Call it after the imports, before a training starts.

    Raises:
        StrictModeError: in strict mode, such a fix exists or no hook is installed; at every call.
    """
    if ckpt_patches.installed is not None:
        ckpt_patches.examine(ckpt_patches.installed.switches)
    else:
        ckpt_patches.complain(_why_no_hook(), ckpt_patches.Switches(os.environ))


def report() -> str:
    """The state of the fixes of each imported package in this process, one line per fix, for people to read."""
    if ckpt_patches.installed is None:
        return _why_no_hook()
    from ckpt_patches.hook.running import trees

    lines = [line for tree in trees(ckpt_patches.installed.switches) for line in tree.report()]
    return "\n".join(lines or ["no package that a fix edits is imported yet"])


def _why_no_hook() -> str:
    reason = ckpt_patches.failure or (
        "no .pth file of ours was read (python -S, --target, PYTHONPATH), or uninstall() was called: call "
        "ckpt_patches.startup.install() before the first import of megatron or deepspeed"
    )
    return f"no import hook is installed in this process, no fix is active by it: {reason}"
