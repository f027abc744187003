"""One report on a folder that a run resumes from as one, and that holds several checkpoints."""

from dataclasses import replace
from pathlib import Path

from ckpt_patches.audit.audit import UNKNOWN, Report
from ckpt_patches.formats import damages
from ckpt_patches.formats.checkpoint import ALONE, Checkpoint
from ckpt_patches.formats.damages import SUSPICION, Finding


def joined(unit: Path, parts: list[Report]) -> Report:
    """The report on a unit: the findings of all its parts, with their folders' names."""
    if [part.checkpoint.path for part in parts] == [unit]:
        return parts[0]
    formats = [part.checkpoint.format for part in parts]
    formats = [name for name in formats if name != "unknown" and not name.endswith(ALONE)] or formats
    found = Checkpoint(
        unit,
        " and ".join(dict.fromkeys(formats)),
        max((part.checkpoint.step for part in parts if part.checkpoint.step is not None), default=None),
        data_parallel=next(filter(None, (part.checkpoint.data_parallel for part in parts)), None),
        shards=[shard for part in parts for shard in part.checkpoint.shards],
        repaired={
            (_within(unit, part, array), shard): ranges
            for part in parts
            for (array, shard), ranges in part.checkpoint.repaired.items()
        },
    )
    return Report(found, tuple(finding for part in parts for finding in _findings(unit, part)))


def _findings(unit: Path, part: Report) -> list[Finding]:
    found = [replace(finding, array=_within(unit, part, finding.array)) for finding in part.findings]
    if part.verdict == UNKNOWN and not any(finding.kind.severity == SUSPICION for finding in found):
        found.append(Finding(damages.NOT_JUDGED, _within(unit, part, ""), detail="no tensor is in it"))
    return found


def _within(unit: Path, part: Report, array: str) -> str:
    """The name of a part's array or file, or of the part itself, in the unit."""
    path = part.checkpoint.path
    name = "" if array == str(path) else array.removeprefix(f"{path}/")
    return name if path == unit else "/".join(filter(None, (str(path.relative_to(unit)), name)))
