"""Train a mixture of experts with DeepSpeed, two expert-parallel ranks of four, and save it.

experts.py OUT STAGE
"""

import os
import sys
import warnings
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

RANKS, HIDDEN = 4, 6

# On a CPU, DeepSpeed would compile its shared-memory operator at run time; a test needs no compiler.
deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))
get_accelerator()._communication_backend_name = "gloo"


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, HIDDEN)
        expert = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN))
        self.experts = MoE(HIDDEN, expert, num_experts=4, ep_size=2, k=2, min_capacity=0)
        self.last = torch.nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> Any:
        hidden, *_ = self.experts(torch.tanh(self.first(x)))
        return self.last(hidden)


def worker(rank: int, out: str, stage: int, port: str) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), MASTER_PORT=port)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Model()
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000},
        "zero_allow_untested_optimizer": True,
    }
    run = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config)[0]
    for step in range(8):
        samples = torch.randn(32, 3, generator=torch.Generator().manual_seed(RANKS * step + rank)).bfloat16()
        run.backward((run(samples).float() - 1).pow(2).mean())
        run.step()
    run.save_checkpoint(out, tag="global_step8")


if __name__ == "__main__":
    out, stage = sys.argv[1:]
    torch.multiprocessing.spawn(worker, (out, int(stage), os.environ["MASTER_PORT"]), nprocs=RANKS)
    print("{}")
