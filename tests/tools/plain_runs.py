"""Runs of plain torch that save with torch.distributed.checkpoint."""

from pathlib import Path

import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict

NOT_FINITE = "exp_avg_sq"  # the state that `save` can spoil


def save(run: Path, step: int, *, damaged: bool = False) -> Path:
    """A save of a run by torch.distributed.checkpoint; damaged: with NaN in a second moment, which no header shows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(step):
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if damaged:
        optimizer.state[model[0].weight][NOT_FINITE][3] = torch.nan
    states = get_state_dict(model, optimizer)
    path = run / f"step-{step}"
    checkpoint.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=path)
    return path
