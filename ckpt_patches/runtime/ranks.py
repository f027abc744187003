"""This process's rank: only the first process of a group logs."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# Set by the launchers in use: torchrun, Slurm, Open MPI.
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


def is_rank_zero(environ: "Mapping[str, str]") -> bool:
    """Whether this process is the first of its process group, by the launcher's environment; true outside a group.

    Also true where a rank is no number: a process that does not know speaks.
    """
    for variable in RANK_VARIABLES:
        rank = environ.get(variable, "").strip()
        if rank:
            return not rank.isdecimal() or not rank.strip("0")
    return True
