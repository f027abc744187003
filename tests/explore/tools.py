"""Judge this project's tools by the facts that an exploration knows about a checkpoint. Compare two converters."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ckpt_patches.audit.audit import DAMAGED, INCOMPLETE, TO_RESUME_FROM, Report, audit
from ckpt_patches.audit.repair.repair import repair
from ckpt_patches.errors import UserError
from ckpt_patches.formats import torch_file
from ckpt_patches.migrate.migrate import Options, migrate

NOT_COMPLETE = (DAMAGED, INCOMPLETE)


def verdict(tag: Path) -> str:
    """The audit's verdict. The audit rejects a folder without an optimizer's file."""
    try:
        return audit(tag, 1).verdict
    except UserError as error:
        return str(error)


def objections(tag: Path) -> tuple[str, str]:
    """The short and full objections of `audit` and `repair` to a checkpoint, or its universal one, that loads right."""
    for folder in filter(Path.exists, (tag, universal(tag))):
        report, of = audit(folder, 1), "checkpoint" if folder == tag else "universal checkpoint"
        if report.verdict in NOT_COMPLETE:
            kinds = sorted({finding.kind.name for finding in report.findings})
            return f"audit of a whole {of}: {', '.join(kinds)}", str(report.findings[:5])[:500]
        if report.verdict in TO_RESUME_FROM and (done := _repaired(report)):
            return f"repair of a whole {of}", done
    return "", ""


def _repaired(report: Report) -> str:
    """The result of the repair of a complete checkpoint, unless `repair` rejected it."""
    path = report.checkpoint.path
    output = path.with_name(f"{path.name}_repaired")
    try:
        return str(repair(path, output, None, 1))
    except UserError as error:
        return "" if "nothing to repair" in str(error) else str(error)


def repaired(tag: Path, older: Path) -> bool:
    """Replace a damaged checkpoint with the repaired one, if `repair` does not decline and reports a repair."""
    output = tag.with_name(f"{tag.name}_repaired")
    try:
        repair(tag, output, older if older != tag and older.exists() else None, 1, reset_moments=True)
    except UserError:
        return False
    tag.rename(tag.with_name(f"{tag.name}_damaged"))
    output.rename(tag)
    return True


def universal(tag: Path, folder: str = "") -> Path:
    """The path of the universal checkpoint, in the same folder or in `folder` beside it.

    A converter also records the latest checkpoint in the folder that it writes to.
    """
    return (tag.parent.with_name(folder) if folder else tag.parent) / f"{tag.name}_universal"


def to_universal(tag: Path, output: Path, release: Path) -> str:
    """Convert a checkpoint for an installed release. Return the error, or nothing."""
    folders = ["--input-folder", str(tag), "--output-folder", str(output)]
    command = [sys.executable, "-m", "ckpt_patches", "to-universal", *folders]
    environment = {**os.environ, "CKPT_PATCHES": "off", "PYTHONPATH": str(release)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return done.stderr.strip()[-1000:] if done.returncode else ""


def migrated(tag: Path) -> str:
    """Replace a checkpoint with the migrated one. Return the error, or nothing."""
    old = tag.rename(tag.with_name(f"{tag.name}_old"))
    try:
        migrate(old, tag, Options(workers=1, trust_checkpoint=True), warn=lambda line: None)
    except UserError as error:
        return str(error)
    return ""


def unlike(one: Path, other: Path) -> list[str]:
    """The parameter states that differ, bit for bit, between two universal checkpoints."""
    found, expected = _states(one), _states(other)
    return sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))


def _states(folder: Path) -> dict[str, tuple[Any, ...]]:
    """The type, shape and bytes of each parameter state and of its related values."""
    found: dict[str, tuple[Any, ...]] = {}
    for file in folder.glob("zero/*/*.pt"):
        for name, tensor in torch_file.tensors_in(torch_file.read(file).value):
            data = torch_file.data_of(file, tensor)
            found[f"{file.parent.name}/{file.stem} {name}".strip()] = (tensor.dtype, tuple(tensor.shape), data)
    return found
