"""Train a mixture of experts under DeepSpeed's AutoEP, with two of four ranks expert-parallel, and save it.

autoep_training.py OUT STAGE [neighbours]      neighbours: ranks 0 and 1 share experts, instead of 0 and 2
"""

import argparse
import sys
import warnings
from types import SimpleNamespace

import deepspeed
import torch

from trainers import deepspeed_training

RANKS, HIDDEN, INNER, EXPERTS = 4, 4, 3, 4


class Experts(torch.nn.Module):
    """Parameters in Mixtral's layout, which AutoEP converts to w1, w2 and w3."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN))
        self.down_proj = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER))


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts()
        self.top_k = 2


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            model_type="mixtral",
            num_local_experts=EXPERTS,
            num_experts_per_tok=2,
            hidden_size=HIDDEN,
            intermediate_size=INNER,
        )
        self.first = torch.nn.Linear(3, HIDDEN)
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
        for layer in self.model.layers:
            layer.mlp = Block()
        self.last = torch.nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.model.layers:
            x = x + layer.mlp(x)
        output: torch.Tensor = self.last(x)
        return output


def train(rank: int, args: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "expert_parallel": {
            "enabled": True,
            "autoep_size": 2,
            "preset_model": "mixtral",
            "use_grouped_mm": False,
        },
        "use_data_before_expert_parallelism": args.neighbours,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": args.stage, "reduce_bucket_size": 1000},
    }
    run = deepspeed.initialize(model=Model(), config=config)[0]
    for step in range(3):
        samples = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(RANKS * step + rank)).bfloat16()
        run.backward((run(samples).float() - 1).pow(2).mean())
        run.step()
    run.save_checkpoint(args.out, tag="global_step3", client_state={"iteration": 3})


if __name__ == "__main__":
    out, stage, *options = sys.argv[1:]
    neighbours = options == ["neighbours"]
    args = argparse.Namespace(out=out, stage=int(stage), neighbours=neighbours)
    deepspeed_training.results(train, RANKS, args)
    print("{}")
