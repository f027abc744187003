"""The state of the fixes in a running program, for `ckpt_patches.startup.report`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckpt_patches.engine.plan import FixResult, Outcome
from ckpt_patches.hook import functions, in_place, log_lines, running

if TYPE_CHECKING:
    from ckpt_patches import Switches

SHOWN = (Outcome.APPLIES, Outcome.NO_MATCH)


def lines(switches: "Switches") -> Iterator[str]:
    """A line for each planned tree, followed by a line for each fix that it needs."""
    changes = functions.changes()
    plans = list(running.plans(switches))
    for plan in plans:
        yield log_lines.upstream(plan)
        applied = in_place.fixes(plan.root, plan.package)
        for result in plan.results:
            if result.outcome in SHOWN or (result.outcome is Outcome.NOT_NEEDED and result.name in applied):
                mine = [change for change in changes if result.name in change.fixes]
                yield f"  {result.name}: {_state(result, mine)}"
    if not plans:
        yield "no module that a fix edits is imported yet"


def _state(result: FixResult, changes: list[functions.Change]) -> str:
    if result.outcome is Outcome.NO_MATCH:
        return f"NOT active: {result.reason}"
    replaced = [str(change) for change in changes if not change.wraps]
    if replaced:
        return f"NOT active any more: {'; '.join(replaced)}"
    active = "active" if result.outcome is Outcome.APPLIES else "active in place"
    return "; ".join([active, *(str(change) for change in changes)])
