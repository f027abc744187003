"""What the import hook says in a job's log: one line on what is active, a warning for each fix without a match."""

import logging
import os

from ckpt_patches import __version__
from ckpt_patches.plan import FixResult, Outcome, TreePlan
from ckpt_patches.startup import is_rank_zero
from ckpt_patches.upstream import DISTRIBUTIONS, version_in

logger = logging.getLogger("ckpt_patches")
# Processes that rank 0 starts (data loader workers, converters) inherit it, and do not repeat the line.
ANNOUNCED = "CKPT_PATCHES_ANNOUNCED"


def announce(plan: TreePlan) -> None:
    """Say on rank 0 what is active in a tree, once a process group, and warn of what does not match."""
    if not is_rank_zero(os.environ):
        return
    upstream = _upstream(plan)
    announced = os.environ.get(ANNOUNCED, "").split(";")
    if upstream not in announced:
        os.environ[ANNOUNCED] = ";".join([*filter(None, announced), upstream])
        active = ", ".join(plan.named(Outcome.APPLIES)) or "none needed"
        _say(logging.INFO, f"training-checkpoint-patches {__version__} on {upstream}: {active}")
    for result in plan.results:
        if result.outcome is Outcome.NO_MATCH:
            warn(mismatch(plan, result))


def mismatch(plan: TreePlan, result: FixResult) -> str:
    """The message for a fix that does not match its upstream."""
    return (
        f"the fix {result.name} is NOT active on {_upstream(plan)}: {result.reason}. The bug may be there: see "
        f"docs/{result.name}.md, report this release, or set CKPT_PATCHES_SKIP={result.name} to go on without it"
    )


def unpatched(fixes: list[str], module: str, origin: str | None, error: Exception) -> str:
    """The message for a module that is loaded without its fixes."""
    names = ", ".join(fixes)
    return (
        f"{names} NOT active: {module} ({origin}): {error}. The bug may be there: install {module.split('.')[0]} with "
        f"its source files, or set CKPT_PATCHES_SKIP={','.join(fixes)} to go on without"
    )


def warn(message: str) -> None:
    """One warning, on rank 0 alone."""
    if is_rank_zero(os.environ):
        _say(logging.WARNING, message)


def _upstream(plan: TreePlan) -> str:
    return f"{DISTRIBUTIONS[plan.package]} {version_in(plan.root, plan.package)} ({plan.root})"


def _say(level: int, message: str) -> None:
    """Log it; where nobody has set up logging yet, which is so while modules are imported, on stderr."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(name)s] %(levelname)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    logger.log(level, message)
