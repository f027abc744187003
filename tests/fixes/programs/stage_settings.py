"""Train two pipeline stages of different weight decay, or load what was converted to OUT/universal.

    stage_settings.py train_and_save OUT
    stage_settings.py load OUT

Prints the weight decay of each stage, as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch

from trainers import deepspeed_training as dt

STAGES = 2


def train_and_save(rank: int, folder: Path) -> float:
    run = engine(weight_decay=0.1 * rank, universal=False)
    step(run)
    dt.save(run, folder)
    return decay(run)


def load(rank: int, folder: Path) -> float:
    """The weight decay of this rank's stage after a universal load."""
    run = engine(weight_decay=0.5, universal=True)
    dt.load(run, folder, dt.UNIVERSAL)
    return decay(run)


def step(run: Any) -> None:
    samples = torch.ones(1, dt.HIDDEN, dtype=next(run.module.parameters()).dtype)
    run.train_batch(iter([(samples, torch.ones(1, 1))] * 2))


def decay(run: Any) -> float:
    return float(dt.groups_of(run)[0]["weight_decay"])


def engine(weight_decay: float, *, universal: bool) -> Any:
    torch.manual_seed(0)
    layers = dt.layers_of(dt.Tiny())
    model = deepspeed.PipelineModule(
        layers, num_stages=STAGES, loss_fn=dt.loss, partition_method="uniform", activation_checkpoint_interval=0
    )
    config = dt.config(1, universal, dt.BF16, dt.zero(1), {"gradient_accumulation_steps": 2, "steps_per_print": 10})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=weight_decay)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


if __name__ == "__main__":
    what, out = sys.argv[1:]
    print("\n" + json.dumps(dt.results({"train_and_save": train_and_save, "load": load}[what], STAGES, Path(out))))
