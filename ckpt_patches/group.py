"""The processes that do one work together, started by a launcher, on one machine or several."""

from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_patches.errors import UserError

ALONE = "none"
# By launcher: the variables that say a process's rank and how many there are, and one that it alone sets. A pod's
# environment has RANK and WORLD_SIZE without torchrun, and a batch script SLURM_PROCID without srun.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
}


@dataclass(frozen=True)
class Group:
    """This process's place among those that work together."""

    rank: int = 0
    size: int = 1
    note: str = ""  # for the user: what this process takes itself for, and why

    @classmethod
    def of(cls, environment: Mapping[str, str], chosen: str = "") -> "Group":
        """By what the user has chosen, `3/16` or `none`, and otherwise by the launcher that has started this process.

        Raises:
            UserError: rank and size are no numbers, or the rank is not below the size.
        """
        if chosen == ALONE:
            return cls()
        if chosen:
            return _numbered(*chosen.partition("/")[::2], f"--group {chosen}")
        for launcher, (rank, size, own) in LAUNCHERS.items():
            if {rank, size, own} <= environment.keys():
                return _numbered(environment[rank], environment[size], f"{launcher}'s {rank} and {size}")
        rank, size, _ = (environment.get(name, "") for name in LAUNCHERS["torchrun"])
        if not rank or size in ("", "1"):
            return cls()
        return cls(
            note=f"RANK={rank} and WORLD_SIZE={size} are set, but not by torchrun, srun or mpirun: this process "
            f"does all of the work; --group {rank}/{size} makes it one of {size} that do it together"
        )


def _numbered(rank: str, size: str, said_by: str) -> Group:
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise UserError(
            f"expected a process's number and how many there are, like 0/16, found {rank}/{size}: {said_by}"
        )
    if size == "1":
        return Group()
    return Group(int(rank), int(size), f"process {rank} of {size}, counted from 0, by {said_by}")
