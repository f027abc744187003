"""Train a small mixture of experts with the real DeepSpeed on four ranks."""

import warnings
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups

from trainers.deepspeed_state import numbered
from trainers.deepspeed_training import BF16, FP32_GRADIENTS, config, cut, flat_groups, zero

RANKS, HIDDEN, EXPERTS, STEPS, MORE = 4, 6, 4, 8, 2


class Expert(torch.nn.Linear):
    """Makes its input contiguous: several experts on a rank get views of one tensor, where torch rounds differently."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.contiguous())


class Model(torch.nn.Module):
    def __init__(self, ep: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, HIDDEN)
        expert = torch.nn.Sequential(Expert(HIDDEN, HIDDEN))
        self.experts = MoE(HIDDEN, expert, num_experts=EXPERTS, ep_size=ep, k=2, min_capacity=0)
        self.last = torch.nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> Any:
        hidden, *_ = self.experts(torch.tanh(self.first(x)))
        return self.last(hidden)


def engine(ep: int, stage: int, universal: bool, most: int = 10**6) -> Any:
    """A run on `ep` expert-parallel ranks; stage 0 is ZeRO-1 with BF16_Optimizer.

    Each param group of experts has at most `most` elements.
    """
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = Model(ep)
    parameters = {"params": list(model.parameters()), "name": "all"}
    by_group = split_params_into_different_moe_groups_for_optimizer(parameters, most)
    settings = config(4, universal, BF16, zero(stage or 1), {} if stage else FP32_GRADIENTS)
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(by_group, lr=1e-2), config=settings)[0]


def train(run: Any, rank: int, steps: range) -> list[float]:
    """The mean loss of every step."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(RANKS * step + rank)
        samples = torch.randn(32, 3, generator=generator).to(run.device, torch.bfloat16)
        torch.manual_seed(RANKS * step + rank)  # the gate draws the second of the two experts at random
        loss = (run(samples).float() - 1).pow(2).mean()
        run.backward(loss)
        with torch.no_grad():  # with grad enabled, 0.18.7 to 0.18.9 gather into views
            run.step()
        torch.distributed.all_reduce(total := loss.detach().clone())
        losses.append(total.item() / RANKS)
    return losses


def state(run: Any, ep: int) -> dict[str, dict[str, torch.Tensor]]:
    """The full weights, main parameters and moments of this rank's parameters, from memory, not from a file."""
    names = {parameter: name for name, parameter in run.module.named_parameters()}
    first = groups._get_expert_parallel_rank(f"ep_size_{ep}") * (EXPERTS // ep)
    optimizer = run.optimizer
    found = {numbered(name, first): {"weight": parameter.detach().clone()} for parameter, name in names.items()}
    for index, (master, parameters) in enumerate(flat_groups(run)):
        sharing = optimizer.real_dp_process_group[index]
        for key, own in {"fp32": master.detach(), **optimizer.optimizer.state[master]}.items():
            if key == "step":
                for parameter in parameters:
                    found[numbered(names[parameter], first)][key] = torch.as_tensor(own)
                continue
            parts = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size(sharing))]
            torch.distributed.all_gather(parts, own.contiguous(), group=sharing)
            for parameter, part in cut(torch.cat(parts), parameters):
                found[numbered(names[parameter], first)][key] = part
    return found
