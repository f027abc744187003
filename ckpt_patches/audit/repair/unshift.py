"""Move the optimizer state of a shifted checkpoint back to its place, in a copy.

Each element comes from where the search found it, mostly the tensor of its parameter or of a neighbor. Elements that
are in no file are left to the ordinary repair, with a finding for each range in each state.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_patches.audit.judging.shifted import Move, Shift
from ckpt_patches.audit.repair.copies import copied, write_elements
from ckpt_patches.errors import UserError
from ckpt_patches.formats import damages
from ckpt_patches.formats.checkpoint import MASTER, MOMENTS
from ckpt_patches.formats.damages import NOTE, Finding
from ckpt_patches.formats.elements import read_elements

ROLES = (MASTER, *MOMENTS)
AT_A_TIME = 1 << 22  # elements


def findings(found: Iterable[Finding], shift: Shift | None) -> Iterator[Finding]:
    """The findings to repair. For a shifted parameter: the ranges in no file, for each state."""
    own = _ranges(shift) if shift else {}
    for finding in found:
        if finding.kind is damages.SHIFTED_STATE and (finding.array, finding.shard) in own:
            yield from (replace(finding, array=a, begin=b, end=e) for a, b, e in own[finding.array, finding.shard])
        else:
            yield finding


def _ranges(shift: Shift) -> dict[tuple[str, str], list[tuple[str, int, int]]]:
    """The ranges in no file, of the master and the moments, by the master's array and shard."""
    return {
        (shard.streams[MASTER].array, shard.label): [
            (shard.streams[role].array, begin, end) for begin, end in lost for role in ROLES
        ]
        for shard, lost in zip(shift.shards, shift.lost, strict=True)
    }


def why_not(finding: Finding, shift: Shift | None) -> str:
    """Why a finding in a shifted checkpoint cannot be repaired; empty if the shift does not prevent it."""
    if shift is None or finding.kind.severity == NOTE:
        return ""
    placed = {
        (shard.streams[role].array, shard.label): by
        for shard, by in zip(shift.shards, shift.by, strict=True)
        for role in ROLES
    }
    key = finding.array, finding.shard
    if finding.kind is damages.SHIFTED_STATE:
        return "" if key in placed else finding.detail
    return "its elements are saved in another place than their own" if placed.get(key, 0) != 0 else ""


def check_older(path: Path, shift: Shift | None) -> None:
    """Reject a shifted checkpoint as the source of moments.

    Raises:
        UserError: it is shifted.
    """
    if shift is not None:
        raise UserError(
            f"{path} is shifted itself, and nothing was written: repair it first, and take the repaired copy"
        )


def gather(shift: Shift | None, path: Path, copy: Path) -> set[str]:
    """Write each element that is in a file to its place in the copy. Returns the copy's changed files."""
    changed: set[str] = set()
    for move in _of_other_places(shift):
        assert shift is not None
        for role in ROLES:
            source, target = (shift.shards[number].streams[role] for number in (move.source, move.target))
            own = copied(target, path, copy)
            for first in range(0, move.length, AT_A_TIME):
                length = min(AT_A_TIME, move.length - first)
                data = read_elements(source, move.begin + first, move.begin + first + length)
                write_elements(own, move.offset + first, memoryview(data).cast("B"))
            changed.update(extent.path for extent in own.extents)
    return changed


def _of_other_places(shift: Shift | None) -> Iterator[Move]:
    for move in shift.moves if shift else ():
        if (move.source, move.begin) != (move.target, move.offset):
            yield move


def listed(shift: Shift | None) -> list[dict[str, Any]]:
    """The moved elements, for the repair list, as ranges of the master's array. The moments moved with them."""
    return [
        {
            "array": shift.shards[move.target].streams[MASTER].array,
            "shard": shift.shards[move.target].label,
            "begin": move.offset,
            "end": move.offset + move.length,
            "source": shift.shards[move.source].streams[MASTER].array,
            "source_shard": shift.shards[move.source].label,
            "source_begin": move.begin,
        }
        for move in _of_other_places(shift)
        if shift is not None
    ]


def moved(shift: Shift | None) -> int:
    """How many elements of masters were moved. Their moments moved with them."""
    return sum(one["end"] - one["begin"] for one in listed(shift))
