"""The command `ckpt-patches migrate`. Imports that need NumPy happen when it runs."""

import argparse
import dataclasses
import json
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_patches.runtime import commands
from ckpt_patches.runtime.options import MANY, add_distributed, add_trust, add_workers, described
from ckpt_patches.runtime.shown import printable_lines
from ckpt_patches.runtime.units import in_bytes

if TYPE_CHECKING:
    from ckpt_patches.migrate.migrate import Options, Summary
    from ckpt_patches.migrate.plan import Plan

MOST_SHOWN = 10  # findings
ITERATION = re.compile(r"iter_(\d{7,15})")  # the name that Megatron-LM looks for
SCHEMA = 2  # JSON version; raised when a key is renamed, removed or changes its meaning
AFTER = """OLD is only read. NEW gets its name when it is complete; until then it is NEW-….unfinished, and the
same command continues from there.

exit status: 0 migrated, or nothing to do (a line says so), 1 not migrated because elements are damaged, 2 not migrated
(a line names the reason), 130 interrupted"""


def add_to(parsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the command line."""
    migrate = parsers.add_parser(
        "migrate",
        help="make old Megatron checkpoints (zarr, flattened) load in 0.16+",
        **described(
            "Convert a checkpoint that megatron-core up to 0.15 wrote (zarr, or optimizer state in flattened ranges) "
            "to one that 0.16 and later load and resume from, bit for bit.",
            "ckpt-patches migrate ckpt/iter_0001000 --output new/iter_0001000 --dry-run",
            "ckpt-patches migrate ckpt/iter_0001000 --output new/iter_0001000",
            after=AFTER,
        ),
    )
    migrate.add_argument("path", type=Path, metavar="OLD", help="the checkpoint's folder, such as iter_0001000")
    migrate.add_argument("--output", type=Path, required=True, metavar="NEW", help="the folder to create")
    migrate.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    migrate.add_argument("--json", action="store_true", help="print JSON (ckpt-patches explain json)")
    migrate.add_argument("--damaged-as-is", action="store_true", help="migrate damaged elements unchanged")
    add_trust(migrate)
    add_workers(migrate, many=MANY)
    add_distributed(migrate)
    migrate.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Migrate, or print the plan. Returns the exit status."""
    from ckpt_patches.migrate import migrate

    say = partial(commands.say, "ckpt-patches")
    chosen = migrate.Options(options.workers, options.damaged_as_is, options.trust_checkpoint)
    with commands.told_as_json(SCHEMA, options.json):
        return _run(options, chosen, say)


def _run(options: argparse.Namespace, chosen: "Options", say: Callable[[str], None]) -> int:
    from ckpt_patches.migrate import migrate

    if options.dry_run:
        planned = migrate.prepare(options.path, chosen)
        print(_plan_as_json(planned) if options.json else printable_lines(_plan_as_text(planned)))
        return 0
    from ckpt_patches.runtime.distributed import joined

    with joined(options.distributed) as ranks:
        summary = migrate.migrate(options.path, options.output, chosen, ranks=ranks, warn=say)
    if summary is not None:
        print(_summary_as_json(summary) if options.json else printable_lines(_summary_as_text(summary)))
    return 0


def _plan_as_text(planned: "Plan") -> str:
    kind = f"{planned.source.kind or 'not distributed'} -> {planned.target_type or 'the same'}"
    size = f"{len(planned.tensors)} tensors, {in_bytes(planned.nbytes)} in {len(planned.files)} files"
    last = f"optimizer's state: {kind}; {size}; nothing was written"
    return "\n".join([*(f"note: {warning}" for warning in planned.warnings), last])


def _plan_as_json(planned: "Plan") -> str:
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "source_type": planned.source.kind,
        "target_type": planned.target_type,
        "bytes": planned.nbytes,
        "files": [file.name for file in planned.files],
        "notes": list(planned.warnings),
    }
    return json.dumps(content, indent=1)


def _summary_as_text(summary: "Summary") -> str:
    before = f" ({summary.files_before} were there already)" if summary.files_before else ""
    written = f"{in_bytes(summary.bytes)} in {summary.files} files{before}"
    kind = f"{summary.source_type or 'weights'} -> {summary.target_type or 'torch_dist'}"
    lines = [
        f"{found.kind.severity}: {found.kind.name} {found.array} {found.shard} {found.detail}".rstrip()
        for found in summary.findings[:MOST_SHOWN]
    ]
    more = len(summary.findings) - MOST_SHOWN
    lines += [f"and {more} more findings: ckpt-patches audit lists them"] if more > 0 else []
    times = f"{summary.seconds:.1f} s ({summary.plan_seconds:.1f} s of it plan and audit)"
    lines.append(f"{summary.output}: {kind}, {summary.verdict}, {written}, {times}")
    if step := ITERATION.fullmatch(Path(summary.output).name):
        lines.append(f"to load it: --load {shlex.quote(str(Path(summary.output).parent))} --ckpt-step {int(step[1])}")
    else:
        lines.append("to load it: give it the name iter_ and its iteration in seven digits, in the folder of --load")
    return "\n".join(lines)


def _summary_as_json(summary: "Summary") -> str:
    findings = [{**dataclasses.asdict(own), "kind": own.kind.name} for own in summary.findings]
    return json.dumps({"schema": SCHEMA, **dataclasses.asdict(summary), "findings": findings})
