"""Train with frozen parameters and hpZ on ranks of two nodes, load in several ways, and print the losses, as JSON.

    hpz_loads.py FOLDER LOAD... [--persistent] [--trained]

`expected` is the next loss of the saved run. For each load, the next loss of a run with other weights after that load
has the load's name. With --persistent no parameter is large enough to be partitioned between its uses; with --trained
none is frozen.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import test_hpz_secondary_weights as proof
from trainers import deepspeed_training as dt

LOADS: dict[str, dict[str, Any]] = {
    "all": {},
    "module": {"load_module_only": True},
    "weights": {"load_optimizer_states": False},
    "universal": {},  # enabled by a setting
}


def losses(rank: int, folder: Path, loads: list[str], frozen: bool) -> dict[str, float]:
    saved = proof.engine(seed=0, frozen=frozen)
    dt.train(saved, rank, proof.RANKS, first=0)
    dt.save(saved, folder)
    if "universal" in loads:
        dt.convert(folder)
    found = {"expected": next_loss(saved, rank)}
    for name in loads:
        run = proof.engine(seed=1, universal=name == "universal", frozen=frozen)
        run.load_checkpoint(str(folder), tag=dt.UNIVERSAL if name == "universal" else dt.TAG, **LOADS[name])
        found[name] = next_loss(run, rank)
    return found


def next_loss(run: Any, rank: int) -> float:
    return dt.train(run, rank, proof.RANKS, first=dt.STEPS)[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("loads", nargs="+", choices=LOADS)
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--trained", action="store_true")
    arguments = parser.parse_args()
    if arguments.persistent:
        dt.KINDS["stage3_hpz"]["zero_optimization"]["stage3_param_persistence_threshold"] = 1000
    dt.allow_pickles()
    args = (arguments.folder, arguments.loads, not arguments.trained)
    print("\n" + json.dumps(dt.results(losses, proof.RANKS, *args, node=proof.NODE)[0]))
