"""The processes that do one work together, started by a launcher, on one machine or several."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt_patches.errors import UserError

ALONE = "none"
MOST_WORKERS = 16  # of one process, where nobody has said how many


@dataclass(frozen=True)
class Launcher:
    """The variables that a launcher sets."""

    rank: str
    size: str
    own: str  # that it alone sets: a pod's environment has the other two as well, and a batch script Slurm's rank
    run: tuple[str, ...]  # what tells this run from others
    on_machine: str  # how many of the processes run on this machine, by machine: 4, or 2(x3),1
    processors: str = ""  # how many processors they have together, where each may be bound to its own


LAUNCHERS = {
    "torchrun": Launcher(
        "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", ("TORCHELASTIC_RUN_ID", "MASTER_PORT"), "LOCAL_WORLD_SIZE"
    ),
    "srun": Launcher(
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_ID",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_CPUS_ON_NODE",
    ),
    "mpirun": Launcher(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        ("PMIX_NAMESPACE",),
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
}


@dataclass(frozen=True)
class Group:
    """This process's place among those that work together."""

    rank: int = 0
    size: int = 1
    note: str = ""  # for the user: what this process takes itself for, and why
    run: str = field(default="", compare=False)  # tells it from other runs at the same time; empty if nothing does
    on_machine: int = field(default=1, compare=False)  # processes on this machine, where that is known
    processors: int = field(default=0, compare=False)  # of them together, where each may be bound to its own

    @classmethod
    def of(cls, environment: Mapping[str, str], chosen: str = "") -> "Group":
        """By what the user has chosen, `3/16` or `none`, and otherwise by the launcher that has started this process.

        Raises:
            UserError: rank and size are no numbers, or the rank is not below the size.
        """
        if chosen == ALONE:
            return cls()
        if chosen:
            return cls(*_numbered(*chosen.partition("/")[::2], f"--group {chosen}"))
        for name, launcher in LAUNCHERS.items():
            if {launcher.rank, launcher.size, launcher.own} <= environment.keys():
                return cls._launched(name, launcher, environment)
        by_torchrun = LAUNCHERS["torchrun"]
        rank, size = (environment.get(name, "") for name in (by_torchrun.rank, by_torchrun.size))
        if not rank or size in ("", "1"):
            return cls()
        return cls(
            note=f"RANK={rank} and WORLD_SIZE={size} are set, but not by torchrun, srun or mpirun: this process "
            f"does all of the work; --group {rank}/{size} makes it one of {size} that do it together"
        )

    @classmethod
    def _launched(cls, name: str, launcher: Launcher, environment: Mapping[str, str]) -> "Group":
        said_by = f"{name}'s {launcher.rank} and {launcher.size}"
        place = _numbered(environment[launcher.rank], environment[launcher.size], said_by)
        run = " ".join(environment.get(variable, "") for variable in launcher.run)
        counts = re.findall(r"(?<!x)\b\d+", environment.get(launcher.on_machine, ""))
        processors = environment.get(launcher.processors, "")
        return cls(*place, run, max(map(int, counts), default=1), int(processors) if processors.isdecimal() else 0)

    def workers(self, usable: int) -> int:
        """How many workers this process has, if it may run on so many processors: its share of them, at most 16."""
        is_bound = usable < self.processors
        return max(1, min(MOST_WORKERS, usable // (1 if is_bound else max(self.on_machine, 1))))


def processors() -> int:
    """On how many this process may run."""
    return len(os.sched_getaffinity(0))


def _numbered(rank: str, size: str, said_by: str) -> tuple[int, int, str]:
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise UserError(
            f"expected a process's number and how many there are, like 0/16, found {rank}/{size}: {said_by}"
        )
    if size == "1":
        return 0, 1, ""
    return int(rank), int(size), f"process {rank} of {size}, counted from 0, by {said_by}"
