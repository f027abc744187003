"""universal checkpoint of 2 tensor-parallel ranks at ZeRO-3"""

from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

from ckpt_patches.demo import deepspeed_training as dt
from ckpt_patches.demo import show

SLICES = 2


def run(folder: Path) -> str:
    slices = dt.results(train_and_save, SLICES, folder)
    if dt.is_refused(folder, "tensor-parallel ranks"):
        return ""
    found = dt.universal_states(folder / dt.UNIVERSAL)["weight"]["fp32"]
    return "" if found.flatten().equal(torch.tensor(slices).flatten()) else "the slices are mixed, and no error"


def train_and_save(rank: int, folder: Path) -> list[float]:
    """Train and save. Returns this tensor-parallel rank's slice of the weight (rows 0 and 1 or rows 2 and 3)."""
    torch.manual_seed(rank)
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=SLICES, num_dp=1)
    run: Any = deepspeed.initialize(
        model=(model := torch.nn.Linear(dt.HIDDEN, 2, bias=False)),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config=dt.config(1, False, dt.BF16, dt.zero(3)),
        mpu=PipelineParallelGrid(topology=topology),
    )[0]
    run.backward(run(torch.ones(1, dt.HIDDEN, dtype=torch.bfloat16)).float().pow(2).mean())
    with torch.no_grad():  # with grad enabled, 0.12 gathers into views
        run.step()
    dt.save(run, folder)
    values: list[float] = run.optimizer.fp32_partitioned_groups_flat[0].tolist()
    return values


if __name__ == "__main__":
    dt.allow_pickles()
    show(run, "no mixed slices")
