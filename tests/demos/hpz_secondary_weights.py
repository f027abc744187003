"""resume with frozen parameters, ZeRO-3 with hpZ, 2 nodes"""

from pathlib import Path
from typing import Any

import torch

from trainers import deepspeed_training as dt

RANKS, NODE = 4, 2


class Adapted(torch.nn.Module):
    """No parameter needs padding: up to 0.13.4 padded secondary partitions are copied only in part."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(dt.HIDDEN, 4)
        self.adapter = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.adapter(torch.tanh(self.base(x)))
        return output


def resume(rank: int, folder: Path) -> str:
    """Train, save, load into a run with other weights, and take two steps in both. Returns what differs, or "".

    The weights are not gathered before: up to 0.14.2 that refreshes the secondary partitions.
    """
    run = engine(seed=0)
    dt.train(run, rank, RANKS, first=0)
    dt.save(run, folder)
    losses = dt.train(run, rank, RANKS, first=dt.STEPS)
    end = dt.snapshot(run)
    resumed = engine(seed=1)
    dt.load(resumed, folder, dt.TAG)
    found = dt.train(resumed, rank, RANKS, first=dt.STEPS)
    wrong = dt.on_any_rank(dt.differences(dt.snapshot(resumed), end))
    if found == losses and not wrong:
        return ""
    loss = f"the next loss is {found[0]:.4f} for {losses[0]:.4f}"
    return f"{loss}, {len(wrong)} of {len(end)} states differ after {dt.STEPS} steps more, and no error"


def engine(seed: int, universal: bool = False, frozen: bool = True) -> Any:
    torch.manual_seed(seed)
    model = Adapted()
    model.base.requires_grad_(not frozen)
    groups = [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad]}]
    return dt.initialize("stage3_hpz", RANKS, model, groups, universal)


if __name__ == "__main__":
    dt.allow_pickles()
    dt.show_result(resume, RANKS, "resumes bit for bit", node=NODE)
