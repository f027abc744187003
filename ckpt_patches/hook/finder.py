"""The finder's work for a target module: call the finders behind it, and install our loader.

All of this runs under Python's import lock, which every import and every `os.fork` waits for: this module reads no
file, plans nothing and logs nothing. This module and those that it imports may only import modules that are loaded in
every interpreter: a thread that holds the import lock must not wait for the lock of a module.
"""

import sys
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import SourceFileLoader
from _thread import _local

from ckpt_patches import is_replaced
from ckpt_patches.hook import running
from ckpt_patches.hook.loader import CheckedLoader, PatchedLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from ckpt_patches import PatchFinder

# The names that this thread looks up in other finders. A finder that calls all others also calls ours.
_asking = _local()


def patched_spec(
    finder: "PatchFinder", fullname: str, path: "Sequence[str] | None", target: "ModuleType | None"
) -> ModuleSpec | None:
    """The spec of a target module from the finders behind ours, with our loader in it."""
    if is_replaced() and not running.has_plans(fullname):  # its fixes are no longer on disk
        finder.give_up()
        return None
    spec = _spec_behind(finder, fullname, path, target)
    loader = spec.loader if spec is not None else None
    if spec is None or loader is None or isinstance(loader, PatchedLoader | CheckedLoader):
        return spec
    if type(loader) is SourceFileLoader:
        _put(spec, PatchedLoader(loader, finder.switches), finder)
    elif hasattr(loader, "exec_module"):
        _put(spec, CheckedLoader(loader, finder.switches, fullname), finder)
    return spec


def checked_spec(
    finder: "PatchFinder", fullname: str, path: "Sequence[str] | None", target: "ModuleType | None"
) -> ModuleSpec | None:
    """The spec of any module, with a loader that first checks loaded targets; None if there is nothing to check.

    Another hook in front of ours can load a target without our loader. That target is checked when the next module is
    loaded.
    """
    if not running.not_examined():
        finder.may_be_bypassed = False
        return None
    spec = _spec_behind(finder, fullname, path, target)
    loader = spec.loader if spec is not None else None
    # The loaders of built-in and frozen modules are classes, which all these modules share.
    if spec is not None and hasattr(loader, "create_module") and not isinstance(loader, type | CheckedLoader):
        _put(spec, CheckedLoader(loader, finder.switches), finder)
    return spec


def _put(spec: ModuleSpec, loader: "PatchedLoader | CheckedLoader", finder: "PatchFinder") -> None:
    try:
        spec.loader = loader  # type: ignore[assignment]
    except Exception:  # another hook's own kind of spec: its module is checked later
        finder.may_be_bypassed = True


def _spec_behind(
    finder: "PatchFinder", fullname: str, path: "Sequence[str] | None", target: "ModuleType | None"
) -> ModuleSpec | None:
    """The spec that Python would find without ours: calls the finders behind it in order. Raises what they raise."""
    names = _asking.__dict__.setdefault("names", set())
    if fullname in names:
        return None
    names.add(fullname)
    try:
        for other in _behind(finder):
            find_spec = getattr(other, "find_spec", None)
            spec: ModuleSpec | None = find_spec(fullname, path, target) if find_spec is not None else None
            if spec is not None:
                return spec
        return None
    finally:
        names.discard(fullname)


def _behind(finder: "PatchFinder") -> list[object]:
    """The finders behind ours; all finders if another hook has replaced ours."""
    finders: list[object] = list(sys.meta_path)
    place = next((index for index, other in enumerate(finders) if other is finder), -1)
    return finders[place + 1 :]
