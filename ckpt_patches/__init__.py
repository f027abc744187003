"""Checkpoint fixes for megatron-core and DeepSpeed, and tools for their checkpoints.

This package is imported at every start of the interpreter, so nothing is imported here, and there is only what every
room knows.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__version__ = "0.1.0"

# Set by the launchers in use: torchrun, Slurm, Open MPI.
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


class StrictModeError(RuntimeError):
    """With `CKPT_PATCHES=strict`, a program in which a fix that is needed does not run is stopped.

    Not an ImportError: `try: import megatron.core … except ImportError` is how others ask whether Megatron is there.
    """


def is_rank_zero(environ: "Mapping[str, str]") -> bool:
    """Whether this process is the first of its process group, by the launcher's environment; true outside a group."""
    for variable in RANK_VARIABLES:
        rank = environ.get(variable, "").strip()
        if rank:
            return rank == "0"
    return True
