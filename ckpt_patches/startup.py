"""What the .pth file runs at every start of the interpreter: read the switches, put the finder in front.

Held under a millisecond: only `os` and `sys`, which are there already, and `atexit`, which is part of the interpreter.
Everything else is imported when the first target module is met. It never imports `megatron`: a script beside a regular
package of that name has to get its own.
"""

import atexit
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    Hook = Any

MODES = ("off", "warn", "strict")
# What every target module's name begins with. The registry itself is read when the first such name is met.
PREFIXES = ("megatron.", "deepspeed.")
# Without one of these in sys.modules no target has been loaded.
PACKAGES = ("megatron.core", "deepspeed")


class Switches:
    """The environment's switches: the mode, the fixes to skip, and what was wrong with them."""

    def __init__(self, environ: "os._Environ[str] | dict[str, str]") -> None:
        self.errors: list[str] = []
        self.mode = environ.get("CKPT_PATCHES") or "warn"
        if self.mode not in MODES:
            self.errors.append(f"CKPT_PATCHES={self.mode}: expected one of {', '.join(MODES)}; going on with warn")
            self.mode = "warn"
        self.skip: frozenset[str] = frozenset()
        if "CKPT_PATCHES_SKIP" in environ:
            self._read_skip(environ["CKPT_PATCHES_SKIP"])

    def _read_skip(self, value: str) -> None:
        from ckpt_patches.engine.registry import FIXES

        names = [name.strip() for name in value.split(",")]
        self.skip = frozenset(name for name in names if name in FIXES)
        unknown = [name for name in names if name and name not in FIXES]
        if unknown:
            self.errors.append(
                f"CKPT_PATCHES_SKIP={','.join(unknown)}: no such fix, nothing is skipped for it; "
                f"the fixes are {', '.join(FIXES)}"
            )


class PatchFinder:
    """A meta path finder that answers for the target modules only, with the ordinary finders' spec and our loader."""

    def __init__(self, switches: Switches) -> None:
        self.switches = switches
        self.uneasy = False  # something may have been loaded without us

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Called with the lock of the import system held, for every import of the process."""
        if fullname.startswith(PREFIXES):
            from ckpt_patches.engine.registry import TARGETS

            if fullname in TARGETS:
                found: ModuleSpec | None = _hook().patched_spec(self, fullname, path, target)
                return found
        in_front = sys.meta_path and sys.meta_path[0] is self
        if (in_front and not self.uneasy) or not _any_loaded() or _is_needed_here(fullname):
            return None
        looked: ModuleSpec | None = _hook().checked_spec(self, fullname, path, target)
        return looked


def _hook() -> "Hook":
    """What is behind this module. A thread in `find_spec` holds the lock of the import system and then takes those of
    the modules that it imports; all others must take them in that order as well.
    """
    import _imp

    _imp.acquire_lock()
    try:
        from ckpt_patches.hook import finder
    finally:
        _imp.release_lock()
    return finder


def _is_needed_here(fullname: str) -> bool:
    """Whether a look at what runs may need that module, which is about to be imported."""
    top = fullname.partition(".")[0]
    return top == "ckpt_patches" or top in sys.stdlib_module_names


def _any_loaded() -> bool:
    return any(package in sys.modules for package in PACKAGES)


def installed_finder() -> "PatchFinder | None":
    """The finder that is in place, or None."""
    for finder in sys.meta_path:
        if isinstance(finder, PatchFinder):
            return finder
    return None


class Handle:
    """What `install` returns: `uninstall` takes the finder away again (patched modules stay as they were loaded)."""

    def __init__(self, finder: PatchFinder) -> None:
        self.finder = finder

    def uninstall(self) -> None:
        global _installed
        atexit.unregister(_examine_at_exit)
        _installed = None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self.finder]


# The finder that was installed, also where somebody has thrown it out of sys.meta_path.
_installed: "PatchFinder | None" = None


def install() -> "Handle | None":
    """Put the finder in front of the meta path, once; None where `CKPT_PATCHES=off`.

    For environments that read no .pth file (`pip install --target`, `python -S`): call it before the first import
    of megatron or deepspeed. A fix to a target that is imported already is not active in any of its modules; that is
    said.

    Raises:
        StrictModeError: there is such a fix, in strict mode. The finder is in place.
    """
    global _installed
    switches = Switches(os.environ)
    if switches.errors:
        from ckpt_patches.ranks import is_rank_zero

        for error in switches.errors if is_rank_zero(os.environ) else ():
            _print(error)
    if switches.mode == "off":
        return None
    finder = installed_finder()
    if finder is None:
        finder = _installed = PatchFinder(switches)
        sys.meta_path.insert(0, finder)
        atexit.unregister(_examine_at_exit)
        atexit.register(_examine_at_exit, switches, os.getpid())
        if _any_loaded():
            _hook().running.examine(switches)
    return Handle(finder)


def verify() -> None:
    """Look at what is loaded, and say which fixes do not run though they are needed.

    For a program that wants to know before it trains: call it after the imports. Without it, the same is looked at
    when a target is imported, when any module is imported while another hook stands in front of ours, and at exit.

    Raises:
        StrictModeError: there is one, in strict mode; every time.
    """
    if _installed is not None and _any_loaded():
        _hook().running.examine(_installed.switches, again=True)


def _examine_at_exit(switches: Switches, process: int) -> None:
    """The last look, on rank 0 and not in the children of a fork: nothing can be stopped any more."""
    if not _any_loaded() or os.getpid() != process:
        return
    from ckpt_patches.errors import StrictModeError
    from ckpt_patches.ranks import is_rank_zero

    if not is_rank_zero(os.environ):
        return
    try:
        _hook().running.examine(switches, at_exit=True)
    except StrictModeError as error:
        _print(str(error))


def _print(message: str) -> None:
    if sys.stderr is not None:
        print(f"ckpt-patches: {message}", file=sys.stderr)


def run() -> None:
    """Install the hook from the .pth file. Never raises: whatever goes wrong, Python starts."""
    try:
        install()
    except Exception as error:
        state = "active" if installed_finder() else "not active"
        _print(f"the import hook is {state}: {type(error).__name__}: {error}")
