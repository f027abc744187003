"""Train a mixture of experts with DeepSpeed, two expert-parallel ranks of four, and save it.

experts.py OUT STAGE
"""

import argparse
import sys
import warnings
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

import zero_training

RANKS, HIDDEN = 4, 6


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


def train(rank: int, args: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = Model()
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": args.stage, "reduce_bucket_size": 1000},
        "zero_allow_untested_optimizer": True,
    }
    run = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config)[0]
    for step in range(8):
        samples = torch.randn(32, 3, generator=torch.Generator().manual_seed(RANKS * step + rank)).bfloat16()
        run.backward((run(samples).float() - 1).pow(2).mean())
        run.step()
    run.save_checkpoint(args.out, tag="global_step8")


if __name__ == "__main__":
    zero_training.on_ranks(argparse.Namespace(work=train, ranks=RANKS, out=sys.argv[1], stage=int(sys.argv[2])))
    print("{}")
