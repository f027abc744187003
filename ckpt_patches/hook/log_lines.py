"""The import hook's lines: one for each package with the active fixes, a warning for each fix that does not run."""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence

from ckpt_patches import tell
from ckpt_patches.engine.fix import every_fix, fixes_of, load
from ckpt_patches.engine.registry import PACKAGES
from ckpt_patches.errors import unknown
from ckpt_patches.runtime.ranks import is_rank_zero
from ckpt_patches.runtime.shown import printable, shortened

logger = logging.getLogger("ckpt_patches")
_logged: dict[str, object] = {}  # the messages of this process


def announce(name: str, root: str, active: Sequence[str], in_place: Sequence[str]) -> None:
    """Log how many fixes are active on a release, and at debug level which. Not in the workers of a data loader."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.current_process().daemon:  # ranks are no daemons
        return
    count = len(active or in_place)
    also = f", {len(in_place)} in place" if active and in_place else " in place" if in_place else ""
    log(logging.INFO, f"{count} fix{'es' * (count != 1)} active{also} on {name} (ckpt-patches status)")
    log(logging.DEBUG, f"{name} in {root}: active: {', '.join(active)}; in place: {', '.join(in_place)}")


def unknown_skips(names: Iterable[str]) -> Iterator[str]:
    """Errors about names of no fix in CKPT_PATCHES_SKIP, at most three."""
    unknown_names = set(names).difference(*map(fixes_of, PACKAGES)) if names else ()
    for name in (printable(shortened(name, 100)) for name in sorted(unknown_names)[:3]):
        yield f"CKPT_PATCHES_SKIP={name}: skips nothing: {unknown('fix', name, every_fix(), 'ckpt-patches list')}"


def problem(fix: str, what: str, name: str) -> str:
    """The message about a fix that does not run on a release."""
    return (
        f"the fix {fix} is {what}. The bug may be in this {name}: "
        f"`ckpt-patches explain {load(fix).switch or fix}` describes it, "
        f"CKPT_PATCHES_SKIP={fix} goes on without the fix"
    )


def log(level: int, text: str, *, at_exit: bool = False) -> None:
    """Log one line once per process, on rank 0; on stderr if logging is not set up yet, or is shut down again."""
    is_set_up = logger.hasHandlers() and not logger.disabled and not at_exit
    if not is_rank_zero(os.environ) or (not logger.isEnabledFor(level) if is_set_up else level < logging.INFO):
        return
    mine, message = object(), printable(text)
    if _logged.setdefault(message, mine) is not mine:  # also by another thread
        return
    try:
        if is_set_up:
            logger.log(level, message)
            return
    except Exception as error:  # in one of the program's handlers: it must not make an import fail
        message = f"{message} ({type(error).__name__} in a logging handler)"
    tell(f"{logging.getLevelName(level)}: {message}", f"[{logger.name}]")
