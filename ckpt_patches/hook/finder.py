"""What the finder does for a target module: ask the finders behind it, and put our loader in. Nothing else.

All of this runs while Python holds the lock of its import system, which every import and every `os.fork` waits for:
no file is read here, nothing is planned, nothing is logged. Nothing is imported here, nor by the modules that this one
imports, but what is loaded in every interpreter: a thread that holds that lock must not wait for the lock of a module.
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

# What this thread asks the other finders for. One that asks all others in its turn comes back to ours.
_asking = _local()


def patched_spec(
    finder: "PatchFinder", fullname: str, path: "Sequence[str] | None", target: "ModuleType | None"
) -> ModuleSpec | None:
    """The spec that the finders behind ours give for a target module, with a loader of ours in it."""
    if is_replaced() and not running.has_plans(fullname):  # what fixes it needs is on the disk no more
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
    """The spec of any module, if there is something to say before it is loaded; else None.

    Another hook can stand in front of ours and load a target without us. What it loaded is looked at when the next
    module is loaded.
    """
    if not running.not_examined():
        finder.uneasy = False
        return None
    spec = _spec_behind(finder, fullname, path, target)
    loader = spec.loader if spec is not None else None
    # Those of modules that are part of the interpreter are classes, and nobody's in particular.
    if spec is not None and hasattr(loader, "create_module") and not isinstance(loader, type | CheckedLoader):
        _put(spec, CheckedLoader(loader, finder.switches), finder)
    return spec


def _put(spec: ModuleSpec, loader: "PatchedLoader | CheckedLoader", finder: "PatchFinder") -> None:
    try:
        spec.loader = loader  # type: ignore[assignment]
    except Exception:  # a spec of another hook's own making: what it loads is looked at later
        finder.uneasy = True


def _spec_behind(
    finder: "PatchFinder", fullname: str, path: "Sequence[str] | None", target: "ModuleType | None"
) -> ModuleSpec | None:
    """What Python would find without us: asks the finders behind ours in their order. Raises what they raise."""
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
    """The finders behind ours; all of them where another hook has put something of its own in ours' place."""
    finders: list[object] = list(sys.meta_path)
    place = next((index for index, other in enumerate(finders) if other is finder), -1)
    return finders[place + 1 :]
