"""What the finder does for a target module: ask the finders behind it, and put our loader in. Nothing else.

All of this runs while Python holds the lock of its import system, which every import and every `os.fork` waits for:
no file is read here, nothing is planned, nothing is logged, and only what is light is imported.
"""

import sys
from _thread import get_ident
from importlib.machinery import ModuleSpec, SourceFileLoader

from ckpt_patches.hook import running
from ckpt_patches.hook.loader import CheckedLoader, PatchedLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from ckpt_patches.startup import PatchFinder


# What each thread asks the other finders for. One that asks all others in its turn comes back to ours.
_asked: set[tuple[int, str]] = set()


def patched_spec(
    finder: "PatchFinder", fullname: str, path: "Sequence[str] | None", target: "ModuleType | None"
) -> ModuleSpec | None:
    """The spec that the finders behind ours give for a target module, with a loader of ours in it."""
    spec = _spec_behind(finder, fullname, path, target)
    if spec is not None and type(spec.loader) is SourceFileLoader:
        spec.loader = PatchedLoader(spec.loader, finder.switches)
        return spec
    return _checked(spec, finder)


def checked_spec(
    finder: "PatchFinder", fullname: str, path: "Sequence[str] | None", target: "ModuleType | None"
) -> ModuleSpec | None:
    """The spec of any module, if there is something to say before it is loaded; else None.

    Another hook can stand in front of ours and load a target without us. What it loaded is looked at when the next
    module is imported.
    """
    if not running.not_examined():
        return None
    return _checked(_spec_behind(finder, fullname, path, target), finder)


def _checked(spec: ModuleSpec | None, finder: "PatchFinder") -> ModuleSpec | None:
    """A spec with a loader that looks at what runs, and then does what the spec's own loader does."""
    # Loaders of modules that are part of the interpreter are classes, and nobody's in particular.
    if spec is not None and hasattr(spec.loader, "exec_module") and not isinstance(spec.loader, type | CheckedLoader):
        spec.loader = CheckedLoader(spec.loader, finder.switches)  # type: ignore[assignment]
    return spec


def _spec_behind(
    finder: "PatchFinder", fullname: str, path: "Sequence[str] | None", target: "ModuleType | None"
) -> ModuleSpec | None:
    """What Python would find without us: asks the finders behind ours in their order. Raises what they raise."""
    question = (get_ident(), fullname)
    if question in _asked:
        return None
    _asked.add(question)
    try:
        for other in _behind(finder):
            find_spec = getattr(other, "find_spec", None)
            if find_spec is None:
                return None  # of before Python 3.4; up to 3.11 the import system asks it in its own way
            spec: ModuleSpec | None = find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None
    finally:
        _asked.discard(question)


def _behind(finder: "PatchFinder") -> list[object]:
    """The finders behind ours; all of them where another hook has put something of its own in ours' place."""
    finders: list[object] = list(sys.meta_path)
    place = next((index for index, other in enumerate(finders) if other is finder), -1)
    return finders[place + 1 :]
