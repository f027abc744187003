"""Save a state of 200 MB on 2 ranks with the real DeepSpeed, or time loads of it.

    python timed_loads.py save FOLDER CASE
    python timed_loads.py load FOLDER CASE LOADS        (for `universal-…` cases, the universal checkpoint)

`load` prints a line of JSON: the seconds of each load on the slowest rank, without the first one, which warms caches.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ckpt_patches.demo import deepspeed_training as dt

RANKS, LAYERS, WIDTH = 2, 14, 1024  # 14 bytes per parameter: main parameter, two moments and the weight


def engine(case: str, seed: int) -> Any:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    groups = [{"params": list(model.parameters()), "weight_decay": 0.01}]
    return dt.initialize(case.removeprefix("universal-"), RANKS, model, groups, universal=case.startswith("universal-"))


def save(rank: int, folder: Path, case: str) -> None:
    run = engine(case.removeprefix("universal-"), seed=0)
    run.backward(run(torch.ones(4, WIDTH, dtype=torch.bfloat16)).float().mean())
    run.step()
    dt.save(run, folder)
    if case.startswith("universal-"):
        dt.convert(folder)


def load(rank: int, folder: Path, case: str, loads: int) -> list[float]:
    run, seconds = engine(case, seed=1), []
    for _ in range(loads + 1):
        torch.distributed.barrier()
        begin = time.perf_counter()
        run.load_checkpoint(str(folder), tag=dt.UNIVERSAL if case.startswith("universal-") else dt.TAG)
        torch.distributed.barrier()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


if __name__ == "__main__":
    mode, path, case = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    dt.allow_pickles()
    if mode == "save":
        dt.results(save, RANKS, path, case)
    else:
        seconds = dt.results(load, RANKS, path, case, int(sys.argv[4]))
        print("\n" + json.dumps([max(of) for of in zip(*seconds, strict=True)]))
