"""Train and save at ZeRO-3 on two tensor-parallel ranks (an `mpu`): zero3_slices.py OUT.

Prints each rank's slice of the weight (rows 0 and 1, rows 2 and 3), from its optimizer's memory, as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

from trainers import deepspeed_training as dt

SLICES = 2


def train_and_save(rank: int, folder: Path) -> list[float]:
    torch.manual_seed(rank)
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=SLICES, num_dp=1)
    run: Any = deepspeed.initialize(
        model=(model := torch.nn.Linear(dt.HIDDEN, 2, bias=False)),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config=dt.config(1, False, dt.BF16, dt.zero(3)),
        mpu=PipelineParallelGrid(topology=topology),
    )[0]
    run.backward(run(torch.ones(1, dt.HIDDEN, dtype=torch.bfloat16)).float().pow(2).mean())
    run.step()
    dt.save(run, folder)
    values: list[float] = run.optimizer.fp32_partitioned_groups_flat[0].tolist()
    return values


if __name__ == "__main__":
    print("\n" + json.dumps(dt.results(train_and_save, SLICES, Path(sys.argv[1]))))
