"""The commands `ckpt-patches audit` and `ckpt-patches repair`."""

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_patches.errors import UserError
from ckpt_patches.runtime import commands
from ckpt_patches.runtime.options import MANY, add_distributed, add_workers, described
from ckpt_patches.runtime.shown import printable, printable_lines

if TYPE_CHECKING:
    from ckpt_patches.audit.audit import Report
    from ckpt_patches.runtime.distributed import Ranks

EXPECTED = "a checkpoint or a folder of checkpoints"


def add_to(parsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Define the commands' options. Imports happen when a command runs."""
    audit = parsers.add_parser(
        "audit",
        help="find damage in checkpoints, and the one to resume from",
        **described(
            "Read checkpoints on the CPU, without the training code, and report which are damaged and where.",
            "ckpt-patches audit /checkpoints/run1",
            "ckpt-patches audit --summary /checkpoints/run1",
            after="exit status: 0 all are WHOLE or REPAIRED, 1 one is DAMAGED or INCOMPLETE, 2 wrong usage or a PATH "
            "without a checkpoint, 3 one is UNKNOWN",
        ),
    )
    audit.add_argument(
        "paths",
        nargs="*",
        type=Path,
        default=[Path()],
        metavar="PATH",
        help="a checkpoint, or a folder of many, of which the newest is read first (default: the current folder)",
    )
    form = audit.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON (ckpt-patches explain json)")
    form.add_argument(
        "--json-lines", action="store_true", help="print a line of JSON for each checkpoint as soon as it is judged"
    )
    form.add_argument(
        "--summary", action="store_true", help="print at most five lines for each run, for a chat or a job's log"
    )
    form.add_argument("--markdown", action="store_true", help="the summary as a Markdown list, for a job's page")
    audit.add_argument("--notes", action="store_true", help="also show notes: unusual, but not damage")
    audit.add_argument(
        "--html", type=Path, metavar="FILE.html", help="write a page: what to resume from, what is damaged and where"
    )
    add_workers(audit, many=MANY)
    add_distributed(audit)
    audit.set_defaults(run=_audit)
    repair = parsers.add_parser(
        "repair",
        help="repair a damaged checkpoint, in a copy",
        **described(
            "Repair a copy of a damaged checkpoint: main parameters from the model's own weights, moments from an "
            "older checkpoint. Refused: damage that is not confined, and files of which one is another run's.",
            "ckpt-patches repair run1/iter_0002000 --output fixed --from run1/iter_0001000",
            after="exit status: 0 the copy is REPAIRED, or PATH is whole (a line says so), 2 nothing was written: a "
            "line has the reason",
        ),
    )
    repair.add_argument("path", type=Path, metavar="PATH", help="one checkpoint")
    repair.add_argument("--output", type=Path, required=True, metavar="NEW", help="the folder to create")
    repair.add_argument(
        "--from",
        dest="older",
        type=Path,
        metavar="OLDER",
        help="an older checkpoint of the run, the source of lost moments",
    )
    repair.add_argument(
        "--reset-moments",
        action="store_true",
        help="without OLDER: set both moments to zero where one is lost, as for a new parameter",
    )
    repair.add_argument("--json", action="store_true", help="print JSON (ckpt-patches explain json)")
    add_workers(repair, many=MANY)
    repair.set_defaults(run=_repair)


def _audit(options: argparse.Namespace) -> int:
    from ckpt_patches.formats.reading import wrong_path

    folders = [path for path in options.paths if path.is_dir()]
    for path in options.paths:
        if path not in folders:
            commands.say("ckpt-patches", str(wrong_path(path, EXPECTED)))
    if not folders:  # before the slow imports and before waiting for other ranks
        return UserError.status
    from ckpt_patches.runtime.distributed import joined

    with joined(options.distributed) as ranks:
        return _audit_together(folders, options, ranks, options.workers or ranks.workers)


def _repair(options: argparse.Namespace) -> int:
    from ckpt_patches.formats.reading import reader_of, wrong_path

    for path in (options.path, options.older):
        if path is not None and (not path.is_dir() or reader_of(path) is None):
            raise wrong_path(path)
    from ckpt_patches.audit.repair.repair import SCHEMA, repair
    from ckpt_patches.runtime.distributed import Ranks

    with commands.told_as_json(SCHEMA, options.json):
        result = repair(
            *(options.path, options.output, options.older, options.workers or Ranks().workers),
            reset_moments=options.reset_moments,
            say=partial(commands.note, "ckpt-patches"),
        )
    if options.json:
        print(json.dumps(result.as_json(), indent=1))
    else:
        print(printable_lines(result.as_text()))
    return 0


def _audit_together(folders: list[Path], options: argparse.Namespace, ranks: "Ranks", workers: int) -> int:
    from ckpt_patches.audit.audit import audit_together
    from ckpt_patches.audit.report import page, text_report
    from ckpt_patches.audit.run_folder import runs
    from ckpt_patches.audit.unit import joined

    def found() -> dict[Path, dict[Path, list[Path]]]:
        if options.html:
            page.require(options.html)
        # The newest by its number first: nothing is read yet.
        return {
            folder: {unit: run[unit] for run in runs(folder).values() for unit in reversed(run)} for folder in folders
        }

    reports: list[Report] = []
    printer = _Printer(keep=bool(options.html))
    every = ranks.first("looking for checkpoints", found)
    units: list[tuple[Path, list[Path]]] = []
    seen = set[str]()  # of paths that are the same, or within each other, a save is judged once
    for unit, parts in (one for own in every.values() for one in own.items()):
        if left := [part for part in parts if os.path.abspath(part) not in seen]:
            units.append((unit, left))
            seen.update(map(os.path.abspath, left))
    for number, (unit, parts) in enumerate(units, 1):
        name = printable(unit.name)
        label = f"{name}, {number} of {len(units)}" if len(units) > 1 else name
        judged = [report for part in parts if (report := audit_together(part, workers, ranks, label))]
        if not judged:
            continue  # rank 0 reports it
        reports.append(joined(unit, judged))
        if options.json_lines:
            printer.print(json.dumps(text_report.line_as_json(reports[-1])))
        elif not (options.json or options.summary or options.markdown):
            printer.print(text_report.as_text(reports[-1], notes=options.notes))
    empty = [folder for folder in folders if not every[folder]]
    return ranks.first("the report", lambda: _end(folders, empty, options, reports, printer))


class _Printer:
    """Standard output. With `keep`, the work goes on when its reader closes it, and the error is raised at the end."""

    def __init__(self, *, keep: bool) -> None:
        self._keep, self._closed = keep, False

    def print(self, text: str) -> None:
        try:
            if not self._closed:
                print(text, flush=True)
        except BrokenPipeError:
            if not self._keep:
                raise
            self._closed = True

    def end(self) -> None:
        if self._closed:
            raise BrokenPipeError


def _end(
    folders: list[Path], empty: list[Path], options: argparse.Namespace, reports: "list[Report]", printer: _Printer
) -> int:
    """Write the output that follows the last checkpoint. Returns the exit status."""
    from ckpt_patches.audit.audit import EXIT_STATUS
    from ckpt_patches.audit.report import page, text_report
    from ckpt_patches.audit.report.run_report import run_reports
    from ckpt_patches.formats.reading import wrong_path

    for path in empty:
        commands.say("ckpt-patches", str(wrong_path(path)))
    if not reports:
        return UserError.status
    runs = [run for folder in dict.fromkeys(folders) for run in run_reports(folder, reports)]
    if options.html:
        page.write(reports, runs, options.html)
    if options.json:
        printer.print(json.dumps(text_report.as_json(reports, runs), indent=1))
    elif options.summary or options.markdown:
        printer.print(text_report.brief(reports, runs, markdown=options.markdown))
    elif not options.json_lines:
        for line in text_report.last_lines(reports, runs, notes=options.notes):
            printer.print(line)
    printer.end()  # flushed: torchrun stops all ranks when one exits with a nonzero status
    statuses = {EXIT_STATUS[report.verdict] for report in reports}
    if empty or len(folders) < len(options.paths):
        statuses.add(UserError.status)
    return min(statuses - {0}, default=0)  # damage, then a wrong path, then doubt
