"""convert ZeRO-1 on 11 ranks"""

from pathlib import Path

import torch

from ckpt_patches.demo import deepspeed_training as dt
from ckpt_patches.demo import show

RANKS = 11


def run(folder: Path) -> str:
    dt.allow_pickles()
    dt.results(train_and_save, RANKS, folder)
    return dt.converted(folder)


def train_and_save(rank: int, folder: Path) -> None:
    """44 elements, 4 per rank: no rank has padding."""
    model = torch.nn.Linear(RANKS, 4, bias=False)
    run = dt.initialize("stage1", RANKS, model, [{"params": list(model.parameters())}], universal=False)
    loss = run(torch.ones(1, RANKS, dtype=torch.bfloat16)).float().pow(2).mean()
    run.backward(loss)
    run.step()
    dt.save_and_keep(run, folder)


if __name__ == "__main__":
    show(run, "converted bit for bit")
