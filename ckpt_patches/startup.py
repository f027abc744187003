"""What the .pth file runs at every start of the interpreter: read the switches, put the finder in front.

Held under a millisecond: only `os` and `sys`, which are there already. Everything else is imported when the first
target module is met. It never imports `megatron`: a script beside a regular package of that name has to get its own.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

MODES = ("off", "warn", "strict")
# What every target module's name begins with. The registry itself is read when the first such name is met.
PREFIXES = ("megatron.", "deepspeed.")
# Set by the launchers in use: torchrun, Slurm, Open MPI.
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


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
        from ckpt_patches.registry import FIXES

        names = [name.strip() for name in value.split(",")]
        self.skip = frozenset(name for name in names if name in FIXES)
        unknown = [name for name in names if name and name not in FIXES]
        if unknown:
            self.errors.append(
                f"CKPT_PATCHES_SKIP={','.join(unknown)}: no such fix, nothing is skipped for it; "
                f"the fixes are {', '.join(FIXES)}"
            )


def is_rank_zero(environ: "os._Environ[str] | dict[str, str]") -> bool:
    """Whether this process is the first of its process group, by the launcher's environment; true outside a group."""
    for variable in RANK_VARIABLES:
        if variable in environ:
            return environ[variable].strip() == "0"
    return True


class PatchFinder:
    """A meta path finder that answers for the target modules only, with the ordinary finders' spec and our loader."""

    def __init__(self, switches: Switches) -> None:
        self.switches = switches

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if not fullname.startswith(PREFIXES):
            return None
        from ckpt_patches.registry import TARGETS

        if fullname not in TARGETS:
            return None
        from ckpt_patches.loader import find_patched_spec

        return find_patched_spec(self, fullname, path, target)


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
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)


def install() -> "Handle | None":
    """Put the finder in front of the meta path, once; None where `CKPT_PATCHES=off`.

    For environments that read no .pth file (`pip install --target`, `python -S`): call it before the first import
    of megatron or deepspeed. A target that is imported already cannot be patched any more; that is said on stderr.
    """
    switches = Switches(os.environ)
    if switches.errors and is_rank_zero(os.environ):
        for error in switches.errors:
            print(f"ckpt-patches: {error}", file=sys.stderr)
    if switches.mode == "off":
        return None
    finder = installed_finder()
    if finder is None:
        _warn_about_imported_targets()
        finder = PatchFinder(switches)
        sys.meta_path.insert(0, finder)
    return Handle(finder)


def _warn_about_imported_targets() -> None:
    if "megatron.core" not in sys.modules and "deepspeed" not in sys.modules:
        return
    from ckpt_patches.registry import TARGETS

    late = [module for module in TARGETS if module in sys.modules]
    if late:
        print(
            f"ckpt-patches: WARNING: {', '.join(late)} was imported before the hook was installed and stays "
            "unpatched; install the hook first",
            file=sys.stderr,
        )


def run() -> None:
    """Install the hook from the .pth file. Never raises: whatever goes wrong, Python starts."""
    try:
        install()
    except Exception as error:
        print(f"ckpt-patches: the import hook is not active: {type(error).__name__}: {error}", file=sys.stderr)
