"""Functions for programs: install and uninstall the import hook, check and report which fixes run.

The hook itself starts in the package's `__init__`, which every interpreter loads at its start; this module is not.
"""

import atexit
import os
import sys

import ckpt_patches
from ckpt_patches import PatchFinder
from ckpt_patches.errors import StrictModeError


class Handle:
    """The result of `install`. `uninstall` removes the finder; modules that are already patched stay patched."""

    def __init__(self, finder: PatchFinder) -> None:
        self.finder = finder

    def uninstall(self) -> None:
        atexit.unregister(ckpt_patches.examine_at_exit)
        ckpt_patches.installed = None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self.finder]


def installed_finder() -> PatchFinder | None:
    """The finder in sys.meta_path, or None."""
    for finder in sys.meta_path:
        if isinstance(finder, PatchFinder):
            return finder
    return None


def install() -> Handle | None:
    """Put the finder in front of the meta path. Idempotent. Returns None with `CKPT_PATCHES=off`.

    For environments that read no .pth file (`pip install --target`, `python -S`): call it before the first import
    of megatron or deepspeed. A fix is not active in any of its modules if one of them is already imported; a warning
    names it.

    Raises:
        StrictModeError: in strict mode, there is such a fix. The finder is installed.
    """
    finder = ckpt_patches.start()
    return None if finder is None else Handle(finder)


def verify() -> None:
    """Check the loaded modules, and warn about needed fixes that do not run.

    A program can call it before it trains, after all imports and after the set-up of code that may replace functions
    of Megatron or DeepSpeed. The same check runs when a target is imported, when any module is imported while another
    hook is in front of ours, and at exit; in strict mode also at each save and load.

    Raises:
        StrictModeError: in strict mode, such a fix exists or no hook is installed; at every call.
    """
    if ckpt_patches.installed is None or ckpt_patches.installed.gone:
        _miss_hook()
    elif ckpt_patches.any_loaded():
        ckpt_patches.load_hook().running.examine(ckpt_patches.installed.switches, again=True)


def report() -> str:
    """The state of the fixes of each imported package in this process, one line per fix, for people to read."""
    if ckpt_patches.installed is None or ckpt_patches.installed.gone:
        return _why_no_hook()
    from ckpt_patches.hook.process_report import lines

    return "\n".join(lines(ckpt_patches.installed.switches))


def _why_no_hook() -> str:
    reason = ckpt_patches.failure or (
        "no .pth file of ours was read (python -S, --target, PYTHONPATH), or uninstall() was called: call "
        "ckpt_patches.startup.install() before the first import of megatron or deepspeed"
    )
    if ckpt_patches.installed is not None:
        reason = "this package was uninstalled or upgraded since this process has started: start it again"
    return f"no import hook is installed in this process, no fix is active by it: {reason}"


def _miss_hook() -> None:
    """Warn at every call, but not with `CKPT_PATCHES=off`. Raises StrictModeError in strict mode."""
    mode = ckpt_patches.Switches(os.environ).mode
    if mode == "strict":
        raise StrictModeError(_why_no_hook())
    if mode != "off":
        ckpt_patches.tell(f"WARNING: {_why_no_hook()}")
