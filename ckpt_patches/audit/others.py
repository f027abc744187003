"""What the processes of a team do that are not the first: each its share of what that one orders."""

from pathlib import Path
from typing import Any

from ckpt_patches.audit.audit import tell_share
from ckpt_patches.audit.copies import Range, copy_ranges, sync
from ckpt_patches.audit.team import Team
from ckpt_patches.errors import UserError


def obey(team: Team, workers: int, called_with: list[str]) -> int:
    """Do this process's share of all that the first one orders; the exit status, which is the first one's.

    Raises:
        UserError: the first one was called with something else than this one.
        OthersFailed: the first one, or another, has failed.
    """
    while True:
        order = team.next_order()
        if "end" in order:
            team.leave()
            return int(order["end"])
        _do(order, team, workers, called_with)


def _do(order: dict[str, Any], team: Team, workers: int, called_with: list[str]) -> None:
    if "begin" in order:
        _compare(order["begin"], called_with)
    for path in order.get("audit", []):
        tell_share(Path(path), workers, team)
    if "copy" in order:
        path, copy = map(Path, order["copy"])
        own = [Range(*found) for found in order["shares"][team.rank]]
        copy_ranges(own, path, copy, team.check)
        sync(own, copy)
        team.tell_done()


def _compare(first: list[str], own: list[str]) -> None:
    """Nothing may be left out because each process was meant to do something else."""
    if first != own:
        raise UserError(
            f"process 0 does {' '.join(first)}, and this one was called to do {' '.join(own)}: the processes of a "
            "launcher do one work together; with --group none each does its own"
        )
