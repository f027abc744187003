"""What a program calls: put the import hook in, take it out, look at what runs.

The hook itself stands in the package, which every interpreter loads at its start; this module it does not.
"""

import atexit
import os
import sys

import ckpt_patches
from ckpt_patches import PatchFinder
from ckpt_patches.errors import StrictModeError


class Handle:
    """What `install` returns: `uninstall` takes the finder away again (patched modules stay as they were loaded)."""

    def __init__(self, finder: PatchFinder) -> None:
        self.finder = finder

    def uninstall(self) -> None:
        atexit.unregister(ckpt_patches.examine_at_exit)
        ckpt_patches.installed = None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self.finder]


def installed_finder() -> PatchFinder | None:
    """The finder that is in place, or None."""
    for finder in sys.meta_path:
        if isinstance(finder, PatchFinder):
            return finder
    return None


def install() -> Handle | None:
    """Put the finder in front of the meta path, once; None where `CKPT_PATCHES=off`.

    For environments that read no .pth file (`pip install --target`, `python -S`): call it before the first import
    of megatron or deepspeed. A fix to a target that is imported already is not active in any of its modules; that is
    said.

    Raises:
        StrictModeError: there is such a fix, in strict mode. The finder is in place.
    """
    finder = ckpt_patches.start()
    return None if finder is None else Handle(finder)


def verify() -> None:
    """Look at what is loaded, and say which fixes do not run though they are needed.

    For a program that wants to know before it trains: call it after the imports, and after the set-up of what may
    replace functions of Megatron or DeepSpeed. Without it, the same is looked at when a target is imported, when any
    module is imported while another hook stands in front of ours, and at exit; in strict mode at each save and load.

    Raises:
        StrictModeError: there is one, or no hook is installed, in strict mode; every time.
    """
    if ckpt_patches.installed is None or ckpt_patches.installed.gone:
        _miss_hook()
    elif ckpt_patches.any_loaded():
        ckpt_patches.load_hook().running.examine(ckpt_patches.installed.switches, again=True)


def report() -> str:
    """What runs in this process: for each imported package the state of its fixes, a line each; for people."""
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
    """Warn, each time; nothing where `CKPT_PATCHES=off`. Raises StrictModeError in strict mode."""
    mode = ckpt_patches.Switches(os.environ).mode
    if mode == "strict":
        raise StrictModeError(_why_no_hook())
    if mode != "off":
        ckpt_patches.tell(f"WARNING: {_why_no_hook()}")
