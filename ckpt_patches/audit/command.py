"""The commands `ckpt-patches audit` and `ckpt-patches repair`."""

import argparse
import json
from pathlib import Path

from ckpt_patches.errors import UserError


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Say what the commands take; what they need is imported when they run."""
    audit = commands.add_parser(
        "audit",
        help="find the damage in checkpoints that exist",
        epilog="exit status: 0 all are whole, 1 one is damaged, 2 one cannot be told, or wrong usage",
    )
    audit.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a checkpoint, or a folder of many")
    audit.add_argument("--json", action="store_true", help="for programs (schema: docs/audit.md)")
    audit.add_argument("--notes", action="store_true", help="show what is odd and no damage, too")
    audit.add_argument("--plot", type=Path, metavar="FILE.png", help="draw where in each array the holes lie")
    audit.add_argument("--workers", type=int, default=2, metavar="N", help="processes that read (default: 2)")
    audit.set_defaults(run=_audit)


def _audit(options: argparse.Namespace) -> int:
    try:
        from ckpt_patches.audit import report
        from ckpt_patches.audit.audit import DAMAGED, EXIT_STATUS, WHOLE, audit, find
    except ModuleNotFoundError as error:
        raise UserError(f"an audit needs {error.name}, which is not installed: pip install {error.name}") from None
    reports, progress = [], report.Progress()
    for checkpoint in [found for path in options.paths for found in _found(path, list(find(path)))]:
        reports.append(audit(checkpoint, progress, options.workers))
        progress.clear()
        if not options.json:
            print(report.as_text(reports[-1], notes=options.notes), flush=True)
    if options.json:
        print(json.dumps(report.as_json(reports), indent=1))
    verdicts = {found.verdict for found in reports}
    if DAMAGED in verdicts:
        return EXIT_STATUS[DAMAGED]
    return max(EXIT_STATUS[verdict] for verdict in verdicts | {WHOLE})


def _found(path: Path, checkpoints: list[Path]) -> list[Path]:
    if not checkpoints:
        raise UserError(f"{path}: expected a checkpoint in a format that is known, found none (docs/audit.md)")
    return checkpoints
