"""The processes that convert together, started by torchrun or srun, on one machine or several."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from ckpt_patches.errors import UserError

LONGEST = timedelta(days=1)  # that a process may wait for the slowest


@dataclass(frozen=True)
class Group:
    """This process's place among those that convert together."""

    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Group":
        """By torch.distributed's variables, or by those that srun sets for a task (a batch script alone has none).

        Raises:
            UserError: srun has started tasks on several machines, and nobody says where they meet.
        """
        if "RANK" in environment and "WORLD_SIZE" in environment:
            return cls(int(environment["RANK"]), int(environment["WORLD_SIZE"]))
        size = int(environment.get("SLURM_STEP_NUM_TASKS", 1))
        if size == 1 or "SLURM_PROCID" not in environment:
            return cls()
        if "MASTER_ADDR" not in environment and environment.get("SLURM_STEP_NUM_NODES", "1") != "1":
            raise UserError(
                "srun does not say where tasks on several machines meet: export "
                'MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)" and MASTER_PORT'
            )
        return cls(int(environment["SLURM_PROCID"]), size)

    def all_succeeded(self, success: bool) -> bool:
        """The one barrier: wait for all processes, and learn whether every one has succeeded."""
        if self.size == 1:
            return success
        import torch
        import torch.distributed as dist

        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        dist.init_process_group("gloo", rank=self.rank, world_size=self.size, timeout=LONGEST)
        successes = torch.tensor([int(success)])
        dist.all_reduce(successes, op=dist.ReduceOp.MIN)
        dist.destroy_process_group()
        return bool(successes.item())
