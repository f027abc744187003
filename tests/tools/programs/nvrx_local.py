"""Save local checkpoints of iterations 5 and 10 on two ranks, by nvidia-resiliency-ext's manager.

nvrx_local.py OUT
"""

import sys
from pathlib import Path

from trainers import fake_gpu
from trainers.gpu import REAL_GPU
from trainers.ranks import free_port, results

if not REAL_GPU:
    fake_gpu.install()

import torch  # isort: skip  after the GPU stub
import torch.distributed as dist

RANKS = 2


def save(rank: int, out: Path, port: int) -> int:
    """Train for a step and save, twice. Each iteration replaces the one before."""
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    manager = LocalCheckpointManager(out, "session")
    torch.manual_seed(rank)
    model = torch.nn.Linear(16, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    for iteration in (5, 10):
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        state = BasicTensorAwareStateDict(
            {}
        )  # which takes tensors of a GPU alone, and holds those of the CPU in a save
        state.state_dict = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration}
        manager.save(state, iteration)
    dist.barrier()
    dist.destroy_process_group()
    return rank


if __name__ == "__main__":
    results(save, RANKS, Path(sys.argv[1]), free_port())
