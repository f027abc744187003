"""What a program calls: put the import hook in, take it out, look at what runs.

The hook itself stands in the package, which every interpreter loads at its start; this module it does not.
"""

import atexit
import sys

import ckpt_patches
from ckpt_patches import PatchFinder


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

    For a program that wants to know before it trains: call it after the imports. Without it, the same is looked at
    when a target is imported, when any module is imported while another hook stands in front of ours, and at exit.

    Raises:
        StrictModeError: there is one, in strict mode; every time.
    """
    if ckpt_patches.installed is not None and ckpt_patches.any_loaded():
        ckpt_patches.load_hook().running.examine(ckpt_patches.installed.switches, again=True)
