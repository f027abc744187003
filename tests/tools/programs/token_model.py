"""A small model with an embedding, a block with a bias of zeros, experts and a head, for drawn checkpoints."""

from typing import Any

import torch
from torch import nn

WIDTH, VOCABULARY, EXPERTS = 16, 64, 4


class Model(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.up = nn.Linear(width, 4 * width)
        self.norm = nn.LayerNorm(4 * width)
        self.down = nn.Linear(4 * width, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(EXPERTS))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.zeros_(self.down.bias)

    def forward(self, tokens: torch.Tensor, experts: int = EXPERTS) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.down(torch.relu(self.norm(self.up(x))))
        x = x + torch.stack([self.experts[n](x) for n in range(experts)]).mean(0)
        found: torch.Tensor = self.head(x)
        return found


def loss_of(model: Any, generator: torch.Generator, seen: int = VOCABULARY, **options: Any) -> torch.Tensor:
    """The loss of one step on the first `seen` tokens. `options` are the model's."""
    tokens = torch.randint(0, seen, (64,), generator=generator)
    targets = torch.randint(0, VOCABULARY, (64,), generator=generator)
    return nn.functional.cross_entropy(model(tokens, **options).float(), targets)
