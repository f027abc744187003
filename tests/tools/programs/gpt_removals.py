"""Write checkpoints of a GPT with experts on two expert-parallel ranks, and load changed ones, with megatron-core.

gpt_removals.py write OUT             OUT/iter_0000001 and OUT/iter_0000003
gpt_removals.py load CASES.json       prints the live state of each rank after the load of each folder in the list,
                                      as a digest by name, or {"error": "..."}
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from gpt_resume import build, everything, sharded, step
from live_states import by_folder, digest
from program_arguments import parsed
from trainers import megatron_training as mt

RANKS = 2
ITERATIONS = (1, 3)
AT_ONCE = 10  # loads per process: Gloo keeps the threads of every group
OPTIONS = argparse.Namespace(
    tp=1, pp=1, ep=2, dp=RANKS, experts=True, of_each=2, fp32=False, inner="fused", optimizer="distributed",
    format="fully_reshardable", backend="torch_dist",
)  # fmt: skip


def main() -> None:
    args = parsed({"work": str, "path": Path})
    if args.work == "write":
        mt.spawn(write, RANKS, args.path)
        return
    found: dict[str, Any] = {}
    folders = json.loads(args.path.read_text())
    for first in range(0, len(folders), AT_ONCE):
        found |= by_folder(lambda own: mt.results(load_all, RANKS, own), folders[first : first + AT_ONCE])
    print(json.dumps(found))


def write(rank: int, out: Path) -> None:
    model, optimizer = build(OPTIONS)
    for number in range(max(ITERATIONS)):
        step(model, optimizer, number)
        if (iteration := number + 1) in ITERATIONS:
            state = sharded(OPTIONS, model, optimizer, is_loading=False)
            sizes = {"data_parallel_size": RANKS, "expert_model_parallel_size": OPTIONS.ep}
            arguments = argparse.Namespace(
                iteration=iteration, bf16=True, consumed_train_samples=2 * iteration, **sizes
            )
            run = {"args": arguments, "iteration": iteration, "checkpoint_version": 3.0}
            mt.write({**state, **run}, out / f"iter_{iteration:07}", OPTIONS.backend)


def load_all(rank: int, folders: list[str]) -> list[dict[str, str]]:
    return [load(folder) for folder in folders]


def load(folder: str) -> dict[str, str]:
    """Load into a model with other numbers."""
    from megatron.core import dist_checkpointing

    model, optimizer = build(OPTIONS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    optimizer.reload_model_params()
    loaded = dist_checkpointing.load(sharded(OPTIONS, model, optimizer, is_loading=True), folder)
    model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    live: dict[str, Any] = {**everything(model, optimizer, OPTIONS.optimizer), "iteration": loaded["iteration"]}
    live["samples"] = loaded["args"].consumed_train_samples
    return {name: digest(value) for name, value in live.items()}


if __name__ == "__main__":
    main()
