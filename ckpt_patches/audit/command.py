"""The commands `ckpt-patches audit` and `ckpt-patches repair`."""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from ckpt_patches.errors import UserError

Result = TypeVar("Result")


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Say what the commands take; what they need is imported when they run."""
    audit = commands.add_parser(
        "audit",
        help="find the damage in checkpoints that exist",
        epilog="exit status: 0 all are whole, 1 one is damaged, 3 of one it cannot be told, 2 wrong usage",
    )
    audit.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a checkpoint, or a folder of many")
    audit.add_argument("--json", action="store_true", help="for programs (schema: docs/audit.md)")
    audit.add_argument("--json-lines", action="store_true", help="the same, a line for each as soon as it is judged")
    audit.add_argument("--notes", action="store_true", help="show what is odd and no damage, too")
    audit.add_argument("--plot", type=Path, metavar="FILE.png", help="draw where in each array the holes lie")
    audit.add_argument("--workers", type=int, default=2, metavar="N", help="processes that read (default: 2)")
    audit.set_defaults(run=_audit)
    repair = commands.add_parser("repair", help="repair what can be repaired, in a copy")
    repair.add_argument("path", type=Path, metavar="PATH", help="one checkpoint")
    repair.add_argument("--output", type=Path, required=True, metavar="NEW", help="the folder that is made")
    repair.add_argument("--from", dest="older", type=Path, metavar="OLDER", help="where lost moments come from")
    repair.add_argument("--workers", type=int, default=2, metavar="N", help="processes that read (default: 2)")
    repair.set_defaults(run=_repair)


def _repair(options: argparse.Namespace) -> int:
    try:
        from ckpt_patches.audit.repair import repair
        from ckpt_patches.audit.repaired import NAME
    except ModuleNotFoundError as error:
        raise _missing("a repair", error) from None
    done = _reading(partial(repair, options.path, options.output, options.older, options.workers))
    for one in done:
        print(f"{one.array} {one.shard}: {one.elements} elements: {one.source}")
    elements = sum(one.elements for one in done)
    print(f"{options.output} is whole: {elements} elements repaired, no other changed; they are listed in it ({NAME})")
    return 0


def _audit(options: argparse.Namespace) -> int:
    try:
        from ckpt_patches.audit import plot, report
        from ckpt_patches.audit.audit import DAMAGED, EXIT_STATUS, WHOLE, audit, find
    except ModuleNotFoundError as error:
        raise _missing("an audit", error) from None
    if options.plot:
        plot.require()
    reports = []
    for checkpoint in _reading(lambda: [found for path in options.paths for found in _found(path, list(find(path)))]):
        reports.append(audit(checkpoint, options.workers))
        if options.json_lines:
            print(json.dumps(report.checkpoint_as_json(reports[-1])), flush=True)
        elif not options.json:
            print(report.as_text(reports[-1], notes=options.notes), flush=True)
    if options.json:
        print(json.dumps(report.as_json(reports), indent=1))
    if options.plot:
        print(f"{options.plot}: {plot.draw(reports, options.plot)} damaged arrays", file=sys.stderr)
    verdicts = {found.verdict for found in reports}
    if DAMAGED in verdicts:
        return EXIT_STATUS[DAMAGED]
    return max(EXIT_STATUS[verdict] for verdict in verdicts | {WHOLE})


def _found(path: Path, checkpoints: list[Path]) -> list[Path]:
    if not checkpoints:
        raise UserError(f"{path}: expected a checkpoint in a format that is known, found none (docs/audit.md)")
    return checkpoints


def _reading(work: Callable[[], Result]) -> Result:
    """A file that cannot be read is a line, not a stack trace."""
    from ckpt_patches.processes import WorkerDefect

    try:
        return work()
    except (OSError, WorkerDefect) as error:
        raise UserError(str(error)) from None


def _missing(what: str, error: ModuleNotFoundError) -> UserError:
    return UserError(f"{what} needs {error.name}, which is not installed: pip install {error.name}")
