"""Checkpoint fixes for megatron-core, DeepSpeed, NVRx, apex and torch, and tools for their checkpoints.

The .pth file runs this module at every start of the interpreter: it reads the switches and installs the finder. No
other module of ours is loaded then, and it takes less than a millisecond: `os` and `sys` are already loaded, `atexit`
is part of the interpreter. All other modules are imported at the first target module. This module never imports
`megatron`: a script beside a regular package of that name must get its own. Programs call `ckpt_patches.startup`.
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

__version__ = "0.3.0.dev0"

MODES = ("off", "warn", "strict")
FINGERPRINT_ON = ("1", "warn")
SWITCHED_OFF = ("0", "off", "")
# Switches of earlier versions: CHANGELOG.md, upgrade notes.
REMOVED = (
    "CKPT_PATCHES_LOST_HOST",
    "CKPT_PATCHES_ANNOUNCED",
    "CKPT_PATCHES_ENABLE",
    "CKPT_PATCHES_OFFLOAD_STEP",
)
# The packages that fixes edit, and their distributions. The registry is read at the first import of a module of one.
# If none of these is in sys.modules, no target has been loaded.
ROOTS = {
    "megatron.core": "megatron-core",
    "megatron.training": "megatron-lm",
    "deepspeed": "deepspeed",
    "nvidia_resiliency_ext": "nvidia-resiliency-ext",
    "apex": "apex",
    "torch.distributed.checkpoint": "torch",
}
# The prefixes of all target modules' names.
PREFIXES = tuple(ROOTS)


def _this_file() -> "tuple[int, int] | None":
    """This file's mtime and size, which differ between versions; None if the file is gone."""
    try:
        found = os.stat(__file__)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


_STARTED_WITH = _this_file()


def is_replaced() -> bool:
    """Whether this package was uninstalled or upgraded since the process started."""
    return _this_file() != _STARTED_WITH


class Switches:
    """The switches in the environment: the mode, the fixes to skip, and errors in them."""

    def __init__(self, environ: "os._Environ[str] | dict[str, str]") -> None:
        self.errors: list[str] = []
        self.unknown_mode = ""  # also in `errors`; every rank prints it, as environments may differ
        self.mode = environ.get("CKPT_PATCHES") or "warn"
        if self.mode not in MODES:
            meant = "strict" if self.mode.strip().lower().startswith("strict") else "warn"
            self.unknown_mode = f"CKPT_PATCHES={self.mode}: expected one of {', '.join(MODES)}; going on with {meant}"
            self.errors.append(self.unknown_mode)
            self.mode = meant
        self.skip = self._read_skip(environ.get("CKPT_PATCHES_SKIP", ""))
        self.overlays: tuple[str, ...] = ()  # edits of upstream that are not fixes
        if "CKPT_PATCHES_FINGERPRINT" in environ:
            self._read_fingerprint(environ["CKPT_PATCHES_FINGERPRINT"])
        if removed := [name for name in REMOVED if name in environ]:
            self.errors.append(f"{', '.join(removed)}: removed, does nothing (CHANGELOG.md, upgrade notes)")

    def _read_skip(self, value: str) -> frozenset[str]:
        """The fixes to leave out."""
        names = [name for name in map(str.strip, value.split(",")) if name]
        if not names:
            return frozenset()
        from ckpt_patches.engine.registry import EVERYTHING, FIXES

        unknown_names = [name for name in names if name not in EVERYTHING]
        for wrong in unknown_names:
            from ckpt_patches.errors import unknown

            self.errors.append(
                f"CKPT_PATCHES_SKIP={wrong}: skips nothing: {unknown('fix', wrong, FIXES, 'ckpt-patches list')}"
            )
        return frozenset(names).difference(unknown_names)

    def _read_fingerprint(self, value: str) -> None:
        if value in SWITCHED_OFF:
            return
        if value not in FINGERPRINT_ON:
            valid = ", ".join(filter(None, (*FINGERPRINT_ON, *SWITCHED_OFF)))
            self.errors.append(f"CKPT_PATCHES_FINGERPRINT={value}: expected one of {valid}; going on with 1")
        self.overlays = ("fingerprint",)
        if self.mode == "off":
            self.errors.append(
                f"CKPT_PATCHES_FINGERPRINT={value} does nothing with CKPT_PATCHES=off: no resume is verified"
            )


class PatchFinder:
    """A meta path finder: it returns the ordinary finders' spec of a target module, with our loader in it."""

    def __init__(self, switches: Switches) -> None:
        self.switches = switches
        self.may_be_bypassed = False  # a target may have been loaded without our loader
        self.gone = False  # this package was replaced since the process started, and a warning was printed

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Find a module's spec. Python calls this for every import, with the import lock held."""
        if self.gone:
            return None
        if fullname.startswith(PREFIXES):
            if not _is_complete() and is_replaced():
                self.give_up()
                return None
            from ckpt_patches.engine import registry

            if fullname in registry.TARGETS:
                found: ModuleSpec | None = load_hook().patched_spec(self, fullname, path, target)
                return found
        in_front = sys.meta_path and sys.meta_path[0] is self
        if (in_front and not self.may_be_bypassed) or not any_loaded() or _is_needed_here(fullname):
            return None
        looked: ModuleSpec | None = load_hook().checked_spec(self, fullname, path, target)
        return looked

    def give_up(self) -> None:
        """Warn once that nothing is patched from now on: the loaded modules of ours do not fit the files on disk.

        Raises:
            RuntimeError: in strict mode, at each target.
        """
        message = (
            f"{os.path.dirname(__file__)} was uninstalled or upgraded after this process had started: no fix is active "
            "in modules of upstream that it imports from now on. Start it again"
        )
        if self.switches.mode == "strict":
            raise RuntimeError(message)
        self.gone = True
        tell(f"WARNING: {message}")


def _is_complete() -> bool:
    """Whether everything that the hook needs is loaded; then the files on disk no longer matter."""
    return "ckpt_patches.hook.functions" in sys.modules


def load_hook() -> "Hook":
    """Import the hook. A thread in `find_spec` holds the import lock and then takes the locks of the modules that it
    imports; all others must take them in the same order.
    """
    import _imp

    _imp.acquire_lock()
    try:
        from ckpt_patches.hook import finder
    finally:
        _imp.release_lock()
    return finder


def _is_needed_here(fullname: str) -> bool:
    """Whether a check of the loaded code may need this module, which is about to be imported."""
    top = fullname.partition(".")[0]
    return top == "ckpt_patches" or top in sys.stdlib_module_names


def any_loaded() -> bool:
    return any(package in sys.modules for package in ROOTS)


# Why `start` failed; empty if it did not.
failure = ""
# The installed finder, even if other code has removed it from sys.meta_path.
installed: "PatchFinder | None" = None


def start() -> "PatchFinder | None":
    """Put the finder in front of the meta path, unless one is there, and return it; None with `CKPT_PATCHES=off`.

    Raises:
        StrictModeError: in strict mode, a needed fix is not active in an imported target. The finder is installed.
    """
    global installed
    switches = Switches(os.environ)
    if switches.errors:
        from ckpt_patches.runtime.ranks import is_rank_zero

        for error in switches.errors:
            if error == switches.unknown_mode or is_rank_zero(os.environ):
                tell(error)
    if switches.mode == "off":
        return None
    for finder in sys.meta_path:
        if isinstance(finder, PatchFinder):
            return finder
    installed = PatchFinder(switches)
    sys.meta_path.insert(0, installed)
    atexit.unregister(examine_at_exit)
    atexit.register(examine_at_exit, switches, os.getpid())
    if any_loaded():
        load_hook().running.examine(switches)
    return installed


def examine_at_exit(switches: Switches, process: int) -> None:
    """Check a last time, on rank 0 and not in forked children. The process ends anyway, so errors are printed."""
    if not any_loaded() or os.getpid() != process or (is_replaced() and not _is_complete()):
        return
    from ckpt_patches.errors import StrictModeError
    from ckpt_patches.runtime.ranks import is_rank_zero

    if not is_rank_zero(os.environ):
        return
    try:
        load_hook().running.examine(switches, at_exit=True)
    except StrictModeError:
        return  # already printed


def tell(message: str) -> None:
    if sys.stderr is not None:
        print(f"ckpt-patches: {message}", file=sys.stderr)


def run() -> None:
    """The entry point of the .pth file. Never raises: Python must start whatever goes wrong."""
    global failure
    try:
        start()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        state = "active" if installed in sys.meta_path else "not active"
        tell(f"the import hook is {state}: {failure}")
