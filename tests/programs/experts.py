"""Train a mixture of experts with DeepSpeed on four ranks, and save it, or load a universal checkpoint of one.

experts.py OUT STAGE [--ep 2]      OUT/global_step8, and beside it each rank's state-RANK.pt, by the experts' numbers
experts.py OUT STAGE [--ep 4] --universal FOLDER      OUT/state-RANK.pt after the load; prints the losses from there
"""

import argparse
import re
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups

import zero_training

RANKS, HIDDEN, EXPERTS, STEPS = 4, 6, 4, 8


class Model(torch.nn.Module):
    def __init__(self, ep: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, HIDDEN)
        expert = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN))
        self.experts = MoE(HIDDEN, expert, num_experts=EXPERTS, ep_size=ep, k=2, min_capacity=0)
        self.last = torch.nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> Any:
        hidden, *_ = self.experts(torch.tanh(self.first(x)))
        return self.last(hidden)


def engine(args: argparse.Namespace) -> Any:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = Model(args.ep)
    parameters = {"params": list(model.parameters()), "name": "all"}
    by_group = split_params_into_different_moe_groups_for_optimizer(parameters)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": args.stage, "reduce_bucket_size": 1000},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": bool(args.universal)},
    }
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(by_group, lr=1e-2), config=config)[0]


def train(run: Any, rank: int, first: int) -> list[float]:
    """The mean loss of every step."""
    losses = []
    for step in range(first, first + STEPS):
        samples = torch.randn(32, 3, generator=torch.Generator().manual_seed(RANKS * step + rank)).bfloat16()
        torch.manual_seed(RANKS * step + rank)  # of two experts the gate draws the second
        loss = (run(samples).float() - 1).pow(2).mean()
        run.backward(loss)
        run.step()
        torch.distributed.all_reduce(total := loss.detach().clone())
        losses.append(total.item() / RANKS)
    return losses


def state(run: Any, ep: int) -> dict[str, dict[str, torch.Tensor]]:
    """The live masters and moments of this rank's parameters, whole, from the running optimizer and from no file."""
    names = {parameter: name for name, parameter in run.module.named_parameters()}
    first = groups._get_expert_parallel_rank(f"ep_size_{ep}") * (EXPERTS // ep)
    optimizer = run.optimizer
    found: dict[str, dict[str, torch.Tensor]] = {}
    for index, (master, parameters) in enumerate(
        zip(optimizer.single_partition_of_fp32_groups, optimizer.round_robin_bit16_groups, strict=True)
    ):
        sharing = optimizer.real_dp_process_group[index]
        for key, own in {"fp32": master.detach(), **optimizer.optimizer.state[master]}.items():
            if key == "step":
                for parameter in parameters:
                    found.setdefault(numbered(names[parameter], first), {})[key] = torch.as_tensor(own)
                continue
            parts = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size(sharing))]
            torch.distributed.all_gather(parts, own.contiguous(), group=sharing)
            flat = torch.cat(parts)
            for parameter in parameters:
                part = flat[: parameter.numel()].view(parameter.shape).clone()
                found.setdefault(numbered(names[parameter], first), {})[key] = part
                flat = flat[parameter.numel() :]
    return found


def numbered(name: str, first: int) -> str:
    """With the expert's number among all."""
    return re.sub(r"(deepspeed_experts\.)(\d+)", lambda match: f"{match[1]}{first + int(match[2])}", name)


def work(rank: int, args: argparse.Namespace) -> None:
    run = engine(args)
    if args.universal:
        run.load_checkpoint(str(args.universal.parent), tag=args.universal.name)
    else:
        train(run, rank, 0)
        run.save_checkpoint(str(args.out), tag="global_step8")
    args.out.mkdir(exist_ok=True)
    torch.save(state(run, args.ep), args.out / f"state-{rank}.pt")
    losses = train(run, rank, STEPS)
    if rank == 0:
        (args.out / "losses.txt").write_text(repr(losses))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("stage", type=int)
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--universal", type=Path)
    args = parser.parse_args(namespace=argparse.Namespace(work=work, ranks=RANKS))
    zero_training.on_ranks(args)
    print((args.out / "losses.txt").read_text())
