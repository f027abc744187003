"""The commands `ckpt-patches audit` and `ckpt-patches repair`."""

import argparse
import contextlib
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ckpt_patches.errors import UserError
from ckpt_patches.options import MANY, add_group, add_workers, described

if TYPE_CHECKING:
    from ckpt_patches.audit.audit import Report
    from ckpt_patches.audit.team import Team
    from ckpt_patches.fingerprint.states import OfZero
    from ckpt_patches.group import Group
    from ckpt_patches.meeting import Meeting

Result = TypeVar("Result")


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", of_zero: "OfZero") -> None:
    """Say what the commands take; what they need is imported when they run."""
    audit = commands.add_parser(
        "audit",
        help="find damage in checkpoints",
        **described(
            "Read checkpoints on the CPU, without the training code, and report which are damaged and where.",
            "ckpt-patches audit /checkpoints/run1",
            after="exit status: 0 all are whole, 1 one is damaged, 2 wrong usage, 3 a verdict is not possible",
        ),
    )
    audit.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a checkpoint, or a folder of many")
    audit.add_argument("--json", action="store_true", help="print JSON (ckpt-patches explain json)")
    audit.add_argument("--json-lines", action="store_true", help="the same, a line for each as soon as it is judged")
    audit.add_argument("--notes", action="store_true", help="show what is odd and no damage, too")
    audit.add_argument("--plot", type=Path, metavar="FILE.png", help="draw where in each array the holes lie")
    audit.add_argument("--html", type=Path, metavar="FILE.html", help="write a page: verdicts, pictures, what to do")
    _add_processes_to(audit)
    audit.set_defaults(run=_audit, of_zero=of_zero)
    repair = commands.add_parser(
        "repair",
        help="repair a damaged checkpoint, in a copy",
        **described(
            "Copy a checkpoint, with its damaged elements restored: main parameters from the model's own weights, "
            "moments from an older checkpoint.",
            "ckpt-patches repair run1/iter_0002000 --output fixed --from run1/iter_0001000",
            after="exit status: 0 repaired, 2 not repaired: a line names the reason",
        ),
    )
    repair.add_argument("path", type=Path, metavar="PATH", help="one checkpoint")
    repair.add_argument("--output", type=Path, required=True, metavar="NEW", help="the folder that is made")
    repair.add_argument("--from", dest="older", type=Path, metavar="OLDER", help="where lost moments come from")
    _add_processes_to(repair)
    repair.set_defaults(run=_repair, of_zero=of_zero)


def _add_processes_to(command: argparse.ArgumentParser) -> None:
    add_workers(command, many=MANY)
    add_group(command)
    where = "beside NEW" if command.prog.endswith("repair") else "beside the first PATH"
    command.add_argument("--meet", type=Path, metavar="FOLDER", help=f"where these processes meet (default: {where})")


@dataclass(frozen=True)
class Work:
    """What the processes of a group do together."""

    name: str
    paths: "list[Path]"
    first: "Callable[[argparse.Namespace, Team, int], int]"  # what the first one does; the exit status


def _repair(options: argparse.Namespace) -> int:
    paths = [options.path, options.output, *([options.older] if options.older else [])]
    return _together(options, Work("a repair", paths, _repair_first), options.output)


def _audit(options: argparse.Namespace) -> int:
    for path in options.paths:
        if not path.is_dir():
            raise UserError(f"{path}: expected a checkpoint or a folder of checkpoints, found no folder")
    return _together(options, Work("an audit", options.paths, _audit_first), options.paths[0])


def _together(options: argparse.Namespace, work: Work, beside: Path) -> int:
    """Work with the other processes of a launcher, if there are any; the exit status, which is the first one's."""
    from ckpt_patches.group import Group
    from ckpt_patches.meeting import Meeting, OthersFailed

    group = Group.of(os.environ, options.group)
    if group.note and group.rank == 0:
        print(f"ckpt-patches: {group.note}", file=sys.stderr)
    meeting = Meeting(group, _meeting_folder(options.meet or Path(os.path.realpath(beside)).parent, group.run))
    try:
        with _met(meeting):
            return _work(options, work, group, meeting)
    except OthersFailed as error:
        if group.rank == 0 or not error.told:
            raise
        return 2  # the first one says why


@contextlib.contextmanager
def _met(meeting: "Meeting") -> "Iterator[None]":
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(meeting)
        except OSError as error:
            raise UserError(
                f"{error.filename}: the processes of the group cannot meet there: {error.strerror}; name a folder "
                "that all of them see and may write to with --meet"
            ) from None
        yield


def _meeting_folder(where: Path, run: str) -> Path:
    """One that all processes of a run know, and those of another do not take."""
    return where / f".ckpt-patches-group-{zlib.crc32(run.encode('utf-8', 'surrogateescape')):08x}"


def _work(options: argparse.Namespace, work: "Work", group: "Group", meeting: "Meeting") -> int:
    try:
        from ckpt_patches.audit.others import obey
        from ckpt_patches.audit.team import Team
    except ModuleNotFoundError as error:
        name = error.name
        raise UserError(f"{work.name} needs {name}, which is not installed: pip install {name}") from None
    from ckpt_patches.group import processors

    team = Team(group, meeting)
    workers = options.workers if options.workers is not None else group.workers(processors())
    called_with = [work.name, *map(str, work.paths)]
    if group.rank:
        return _reading(lambda: obey(team, workers, called_with))
    team.order(begin=called_with)
    status = work.first(options, team, workers)
    sys.stdout.flush()  # a launcher may end this process when the others have ended
    team.end(status)
    return status


def _repair_first(options: argparse.Namespace, team: "Team", workers: int) -> int:
    from ckpt_patches.audit.repair import repair
    from ckpt_patches.audit.repaired import NAME

    result = _reading(partial(repair, options.path, options.output, options.older, workers, team, options.of_zero))
    for one in result.done:
        print(f"{one.array} {one.shard}: {one.elements} elements: {one.source}")
    for own in result.copies:
        doubt = f", with what can differ between ranks: {own.differs}" if own.differs else ""
        print(f"{own.name}: copied for {len(own.missing)} ranks{doubt}")
    elements = sum(one.elements for one in result.done)
    moved = f", {result.moved} of masters, and of their moments, moved to their places" if result.moved else ""
    changed = f"{elements} elements repaired{moved}, no other changed"
    print(f"{options.output} is whole: {changed}; they are listed in it ({NAME})")
    return 0


def _audit_first(options: argparse.Namespace, team: "Team", workers: int) -> int:
    from ckpt_patches.audit import report
    from ckpt_patches.audit.audit import DAMAGED, EXIT_STATUS, WHOLE, audit, find

    _require_pictures(options)
    reports = []
    found = _reading(lambda: [found for path in options.paths for found in _found(path, list(find(path)))])
    team.order(audit=list(map(str, found)))
    for checkpoint in found:
        reports.append(audit(checkpoint, workers, team, options.of_zero))
        if options.json_lines:
            print(json.dumps(report.line_as_json(reports[-1])), flush=True)
        elif not options.json:
            print(report.as_text(reports[-1], notes=options.notes), flush=True)
    if options.json:
        print(json.dumps(report.as_json(reports), indent=1))
    _reading(lambda: _write_pictures(options, reports))
    verdicts = {found.verdict for found in reports}
    if DAMAGED in verdicts:
        return EXIT_STATUS[DAMAGED]
    return max(EXIT_STATUS[verdict] for verdict in verdicts | {WHOLE})


def _require_pictures(options: argparse.Namespace) -> None:
    """Say before an audit of hours what cannot be drawn after it."""
    from ckpt_patches.audit import page, plot

    if options.plot:
        plot.require(options.plot)
    if options.html:
        page.require(options.html)


def _write_pictures(options: argparse.Namespace, reports: "list[Report]") -> None:
    from ckpt_patches.audit import page, plot

    if options.plot:
        with _written(options.plot):
            arrays = plot.draw(reports, options.plot)
        print(f"{options.plot}: {arrays} arrays with findings", file=sys.stderr)
    if options.html:
        with _written(options.html):
            page.write(reports, options.html)
        print(f"{options.html}: {page.headline(reports)}", file=sys.stderr)


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    """An error has the file's own name, not that of a temporary one."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def _found(path: Path, checkpoints: list[Path]) -> list[Path]:
    if not checkpoints:
        raise UserError(f"{path}: expected a checkpoint in a known format, found none (ckpt-patches explain audit)")
    return checkpoints


def _reading(work: Callable[[], Result]) -> Result:
    """A file that cannot be read is a line, not a stack trace."""
    from ckpt_patches.processes import WorkerDefect

    try:
        return work()
    except (OSError, WorkerDefect) as error:
        raise UserError(str(error)) from None
