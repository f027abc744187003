"""The small model that the writers save: its training on two Gloo ranks, and its sharding by FSDP.

The programs run in their own environments and import nothing of this project.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

RANKS, TOKENS, LENGTH, WIDTH, STEPS = 2, 37, 9, 24, 3


class SmallModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.register_buffer("positions", torch.arange(float(LENGTH)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        found: torch.Tensor = self.head(self.norm(x))
        return found


def fsdp1(model: nn.Module, *, keeps_parameters: bool = False) -> nn.Module:
    """`keeps_parameters` is `use_orig_params`."""
    policy = ModuleWrapPolicy({nn.Linear})
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=cpu, use_orig_params=keeps_parameters)


def fsdp2(model: nn.Module, **options: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def batch() -> torch.Tensor:
    return torch.randint(0, TOKENS, (4, LENGTH))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def take_steps(model: nn.Module, optimizer: Any, steps: int = STEPS) -> None:
    for _ in range(steps):
        loss_of(model, batch()).backward()
        optimizer.step()
        optimizer.zero_grad()


def on_ranks(work: Callable[..., None], *arguments: Any) -> None:
    """Run `work(*arguments)` on two Gloo ranks, on the port MASTER_PORT; raises if a rank fails."""
    torch.multiprocessing.spawn(_rank, args=(work, arguments), nprocs=RANKS)


def _rank(rank: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS}
    os.environ.update({name: str(value) for name, value in of_rank.items()})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    work(*arguments)
    dist.destroy_process_group()
