"""The import hook's lines in a job's log: one line with the active fixes, a warning for each inactive fix."""

import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpt_patches import __version__
from ckpt_patches.engine.installed import DISTRIBUTIONS, version_in
from ckpt_patches.engine.plan import FixResult, Outcome, TreePlan, fixes_for
from ckpt_patches.engine.registry import EVERYTHING, SWITCHED, TARGETS
from ckpt_patches.engine.releases import is_too_old, too_old
from ckpt_patches.errors import StrictModeError
from ckpt_patches.runtime.ranks import is_rank_zero

if TYPE_CHECKING:
    from ckpt_patches import Switches

logger = logging.getLogger("ckpt_patches")
# The messages that this process has logged.
_logged: set[str] = set()


def tell(plan: TreePlan, switches: "Switches", *, at_exit: bool = False) -> None:
    """Log on rank 0 which fixes are active in a tree, once per process, and warn about those that do not match.

    `at_exit`: print to stderr, because logging is shut down by then.

    Raises:
        StrictModeError: in strict mode, a fix does not match or the release is not supported; on every rank.
    """
    if not at_exit:
        _announce(plan)
    version = version_in(plan.root, plan.package)
    messages = [too_old(plan.package, version)] if is_too_old(plan.package, version) else []
    messages += [mismatch(plan, result) for result in plan.results if result.outcome is Outcome.NO_MATCH]
    warn_or_raise(messages, switches, at_exit=at_exit)


def warn_or_raise(messages: Sequence[str], switches: "Switches", *, at_exit: bool = False) -> None:
    """Log the messages as warnings on rank 0; in strict mode raise StrictModeError with the first, on every rank."""
    for message in messages:
        warn(message, at_exit, error=switches.mode == "strict")
    if messages and switches.mode == "strict":
        raise StrictModeError(messages[0])


def log_unpatched(module: str, path: str, error: Exception, switches: "Switches", *, at_exit: bool = False) -> None:
    """Warn that a module is loaded without any of its fixes; in strict mode raise StrictModeError."""
    names = fixes_for(TARGETS[module], switches.skip, switches.overlays)
    fixes = [name for name in names if module in EVERYTHING[name]]
    if not fixes:
        return
    message = (
        f"{', '.join(fixes)} NOT active: {module} ({path}): {error}. The bug may be there: install "
        f"{module.split('.')[0]} with its source files, or set CKPT_PATCHES_SKIP={','.join(fixes)} to go on without"
    )
    warn(message, at_exit, error=switches.mode == "strict")
    if switches.mode == "strict":
        raise StrictModeError(message) from error


def mismatch(plan: TreePlan, result: FixResult) -> str:
    """The message for a fix that does not match."""
    page = next((page for page, parts in SWITCHED.items() if result.name in parts), result.name)
    return (
        f"the fix {result.name} is NOT active on {upstream(plan)}: {result.reason}. The bug may be there: see "
        f"`ckpt-patches explain {page}`; report a release that it does not match, or set "
        f"CKPT_PATCHES_SKIP={result.name} to go on without it"
    )


def _announce(plan: TreePlan) -> None:
    """Log the active fixes of a tree, once per process, and not in the workers of a data loader."""
    name, fixes = upstream(plan), " ".join(result.name for result in plan.results)
    if f"{name} {fixes}" in _logged or not is_rank_zero(os.environ) or not _enabled(logging.INFO) or _is_worker():
        return
    active, is_first = ", ".join(plan.named(Outcome.APPLIES)), name not in _logged
    _logged.update((name, f"{name} {fixes}"))
    if active or is_first:  # do not log a further part of the package that needs no fix
        none = "none active" if plan.named(Outcome.NO_MATCH) else "none needed"
        _log(logging.INFO, f"training-checkpoint-patches {__version__} on {name}: {active or none}")


def warn(message: str, at_exit: bool, *, error: bool = False) -> None:
    """Log a warning on rank 0, once per process. At exit in strict mode, repeat it as an `error`."""
    if not is_rank_zero(os.environ) or (message in _logged and not (at_exit and error)):
        return
    _logged.add(message)
    if at_exit:
        _print(logging.ERROR if error else logging.WARNING, message)
    else:
        _log(logging.WARNING, message)


def _is_worker() -> bool:
    """Whether this is a daemon of `multiprocessing`, such as a data loader's worker; ranks are not daemons."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and bool(process.current_process().daemon)


def upstream(plan: TreePlan) -> str:
    """The release and the folder of a tree."""
    return f"{DISTRIBUTIONS[plan.package]} {version_in(plan.root, plan.package)} ({plan.root})"


def _enabled(level: int) -> bool:
    return not _is_set_up() or logger.isEnabledFor(level)


def _is_set_up() -> bool:
    """Whether the program has set up logging, and has not disabled our logger."""
    return logger.hasHandlers() and not logger.disabled


def _log(level: int, message: str) -> None:
    """Log a message; print it to stderr if logging is not set up yet, as usual during imports."""
    if not _is_set_up():
        _print(level, message)
        return
    try:
        logger.log(level, message)
    except Exception as error:  # in one of the program's handlers: it must not make an import fail
        _print(level, f"{message} ({type(error).__name__} in a logging handler: {error})")


def _print(level: int, message: str) -> None:
    if sys.stderr is not None:
        print(f"[{logger.name}] {logging.getLevelName(level)}: {message}", file=sys.stderr)
