"""Checkpoint fixes for megatron-core, DeepSpeed, NVRx, apex and torch, and tools for their checkpoints.

The .pth file runs this module at every start of the interpreter: it reads the switches and installs the finder, in less
than a millisecond, as all that it imports is part of the interpreter. Our other modules are imported at the first one
of an upstream package. None imports `megatron`: a script beside a regular package of that name must get its own.

Nothing here may stop Python, or in warn mode a program: whatever goes wrong is one line on stderr.
"""

import atexit
import os
import sys
from _frozen_importlib_external import SourceFileLoader
from _thread import _local

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType
    from typing import Any

    from ckpt_patches.hook.running import Part

__version__ = "0.3.0"

MODES = ("off", "warn", "strict")
FINGERPRINT = {"1": True, "warn": True, "0": False, "off": False, "": False}
REMOVED = ("CKPT_PATCHES_LOST_HOST", "CKPT_PATCHES_ANNOUNCED", "CKPT_PATCHES_ENABLE", "CKPT_PATCHES_OFFLOAD_STEP")
# The packages that fixes edit, and their distributions.
ROOTS = {
    "megatron.core": "megatron-core",
    "megatron.training": "megatron-lm",
    "deepspeed": "deepspeed",
    "nvidia_resiliency_ext": "nvidia-resiliency-ext",
    "apex": "apex",
    "torch.distributed.checkpoint": "torch",
}
PREFIXES = tuple(f"{root}." for root in ROOTS)


class StrictModeError(RuntimeError):
    """With `CKPT_PATCHES=strict`, a needed fix does not run.

    Not an ImportError: other code uses `try: import megatron.core … except ImportError` to test for Megatron.
    """


class Switches:
    """The switches in the environment: the mode, the fixes to skip, and errors in them."""

    def __init__(self, environ: "os._Environ[str] | dict[str, str]") -> None:
        self.errors: list[str] = []
        self.unknown_mode = ""  # also in `errors`; every rank prints it, as environments may differ
        self.mode = environ.get("CKPT_PATCHES") or "warn"
        if self.mode not in MODES:
            meant = "strict" if self.mode.strip().lower().startswith("strict") else "warn"
            found, expected = _shown(self.mode), ", ".join(MODES)
            self.unknown_mode = f"CKPT_PATCHES={found}: expected one of {expected}; going on with {meant}"
            self.errors.append(self.unknown_mode)
            self.mode = meant
        # Unknown names are reported when a package is planned: to list the fixes takes longer than a start.
        self.skip = frozenset(filter(None, map(str.strip, environ.get("CKPT_PATCHES_SKIP", "").split(","))))
        self.overlays: tuple[str, ...] = ()  # edits of upstream that are not fixes
        fingerprint = environ.get("CKPT_PATCHES_FINGERPRINT", "")
        if FINGERPRINT.get(fingerprint, True):
            self.overlays = ("fingerprint",)
        if fingerprint not in FINGERPRINT:
            found, expected = _shown(fingerprint), ", ".join(filter(None, FINGERPRINT))
            self.errors.append(f"CKPT_PATCHES_FINGERPRINT={found}: expected one of {expected}; going on with 1")
        if self.overlays and self.mode == "off":
            setting = f"CKPT_PATCHES_FINGERPRINT={_shown(fingerprint)}"
            self.errors.append(f"{setting} does nothing with CKPT_PATCHES=off: no resume is verified")
        if removed := [name for name in REMOVED if name in environ]:
            self.errors.append(f"{', '.join(removed)}: removed, does nothing (CHANGELOG.md, upgrade notes)")


def _shown(value: str) -> str:
    """A value from outside: at most 100 characters, on one line."""
    from ckpt_patches.runtime.shown import printable, shortened

    return printable(shortened(value, 100))


class PatchedLoader(SourceFileLoader):
    """Runs the edited text of one upstream module. Python calls it outside of the import lock.

    Upstream's bytecode is neither read nor written: a `.pyc` may be stale (unchecked hash), and one with edited code
    would outlive an uninstall. A module without an edit is handed back to its ordinary loader.
    """

    def __init__(self, name: str, path: str, switches: Switches) -> None:
        super().__init__(name, path)
        self.switches = switches
        self.part: Part | None = None

    def __reduce__(self) -> "tuple[Any, ...]":
        return SourceFileLoader, (self.name, self.path)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        """Hand a module without an edit back: errors and bytecode are then as without our hook."""
        if self._part() is None and spec.loader is self:
            spec.loader = SourceFileLoader(self.name, self.path)
        return None

    def exec_module(self, module: "ModuleType") -> None:
        """Run the edited code in a module, also if another hook's loader calls this one.

        Raises:
            StrictModeError: in strict mode, a fix of an imported package does not run.
        """
        part, run = self._part(), super().exec_module
        run(module) if part is None else part.run(module, run)

    def get_code(self, fullname: str) -> "CodeType | None":
        """The edited code, for `exec_module` and `python -m`. Raises as `exec_module`."""
        part = self._part()
        return super().get_code(fullname) if part is None or part.file is None else part.code()

    def get_data(self, path: "Any") -> bytes:
        if self.part is None or self.part.file is None or path != self.path:
            return super().get_data(path)
        return self.part.file.patched

    def _part(self) -> "Part | None":
        """What is edited in the module; None if nothing is, or after an error of ours, with a warning."""
        if self.part is None:
            try:
                from ckpt_patches.hook.running import part_of

                self.part = part_of(self.name, self.path, self.switches)
            except StrictModeError:
                raise
            except Exception as error:
                complain(f"no fix is active in what is imported from now on: {_described(error)}", self.switches)
        return self.part


class PatchFinder:
    """A meta path finder: it returns the spec of the finders behind it, with our loader in it.

    Python holds its import lock meanwhile: nothing is imported, read or logged here.
    """

    def __init__(self, switches: Switches) -> None:
        self.switches = switches
        self.asking = _local()

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """The spec that the finders behind ours find; from all finders if another hook has replaced ours.

        A finder that asks all others asks ours as well, which then leaves that one out. Raises what the others raise.
        """
        if not fullname.startswith(PREFIXES) and fullname not in ROOTS:
            return None
        finders: list[object] = list(sys.meta_path)
        place = next((index for index, other in enumerate(finders) if other is self), -1)
        asked = self.asking.__dict__.setdefault("asked", set())
        for other in finders[place + 1 :]:
            find_spec, question = getattr(other, "find_spec", None), (fullname, id(other))
            if find_spec is None or question in asked:
                continue
            asked.add(question)
            try:
                spec: ModuleSpec | None = find_spec(fullname, path, target)
            finally:
                asked.discard(question)
            if spec is not None and type(spec.loader) is SourceFileLoader:
                try:
                    spec.loader = PatchedLoader(spec.loader.name, spec.loader.path, self.switches)
                except Exception:  # another hook's kind of spec, which cannot be changed: `examine` names the module
                    return spec
            if spec is not None:
                return spec
        return None

    def uninstall(self) -> None:
        """Remove the finder. Modules that are already patched stay patched."""
        global installed
        installed = None
        atexit.unregister(examine)
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]


# Why `start` failed; empty if it did not.
failure = ""
# The installed finder, even if other code has removed it from sys.meta_path.
installed: "PatchFinder | None" = None
_told: set[str] = set()


def start() -> "PatchFinder | None":
    """Put the finder in front of the meta path, unless one is there, and return it; None with `CKPT_PATCHES=off`.

    Raises:
        StrictModeError: in strict mode, a fix of an imported package does not run. The finder is installed.
    """
    global installed
    switches = Switches(os.environ)
    for error in switches.errors:
        if error == switches.unknown_mode or speaks():
            tell(error)
    if switches.mode == "off":
        return None
    if installed in sys.meta_path:
        return installed
    installed = PatchFinder(switches)
    sys.meta_path.insert(0, installed)
    atexit.register(examine, switches, exit_of=os.getpid())
    examine(switches)
    return installed


def examine(switches: Switches, *, exit_of: int = 0) -> None:
    """Compare what runs in the imported packages with what was planned for them, and warn once on rank 0.

    At the exit of a process, but not of its forks: `exit_of` is its number. What strict mode refuses is printed then.

    Raises:
        StrictModeError: in strict mode, at every call: a fix does not run.
    """
    is_wanted = exit_of in (0, os.getpid()) and any(package in sys.modules for package in ROOTS)
    if not is_wanted or (switches.mode != "strict" and not speaks()):
        return
    try:
        from ckpt_patches.hook.running import examine_all

        examine_all(switches, at_exit=bool(exit_of))
    except StrictModeError:
        raise
    except Exception as error:
        message = f"could not find out which fixes run: {_described(error)}"
        if exit_of and switches.mode == "strict":  # too late to refuse
            tell(message)
        else:
            complain(message, switches)


def complain(message: str, switches: Switches) -> None:
    """Warn once on rank 0. Raises StrictModeError in strict mode, at every call."""
    if switches.mode == "strict":
        raise StrictModeError(message)
    if switches.mode == "warn" and message not in _told and speaks():
        _told.add(message)
        tell(f"WARNING: {message}")


def _described(error: Exception) -> str:
    """An error of ours, such as after an uninstall under a running process."""
    what = " ".join(str(error).split())[:500]
    return f"{type(error).__name__}: {what}: start the program again, or install training-checkpoint-patches again"


def speaks() -> bool:
    """Whether this process prints: the first of its process group, or one that does not know."""
    try:
        from ckpt_patches.runtime.ranks import is_rank_zero

        return is_rank_zero(os.environ)
    except Exception:
        return True


def tell(message: str, name: str = "ckpt-patches:") -> None:
    """Print a line on stderr. Never raises.

    Python's own is written without its buffer: what a full disk refuses would stay there, and end the process with 120.
    """
    line = f"{name} {message}\n"
    try:
        if sys.stderr is not sys.__stderr__:
            sys.stderr.write(line)
        elif sys.stderr is not None:
            sys.stderr.flush()
            os.write(sys.stderr.fileno(), line.encode(sys.stderr.encoding, "backslashreplace"))
    except Exception:
        return


def run() -> None:
    """The entry point of the .pth file. Never raises: Python must start whatever goes wrong."""
    global failure
    try:
        start()
        if "uninstall" in sys.orig_argv:
            from ckpt_patches.inplace.uninstall import tell_what_stays

            tell_what_stays(sys.orig_argv)
    except StrictModeError as error:  # the next import of what it is about raises it
        tell(str(error))
    except Exception as error:
        failure = _described(error)
        tell(f"the import hook failed: {failure}")
