"""Load a checkpoint of a release that saved no step into the real hybrid optimizer, with nothing offloaded.

hybrid_old_step.py OUT save    OUT/checkpoint after five steps
hybrid_old_step.py OUT load    the error, or ""
"""

import argparse
import json
from pathlib import Path
from typing import Any

from program_arguments import parsed
from trainers import megatron_training as mt

FORMAT, STEPS = "fully_reshardable", 5


def main() -> None:
    options = parsed({"out": Path, "what": str})
    mt.use_inner_optimizer("fused")
    (found,) = mt.results(save if options.what == "save" else load, 1, options)
    print(json.dumps(found))


def build() -> Any:
    return mt.build(offload_fraction=0.0, precision_aware=True)


def save(rank: int, options: argparse.Namespace) -> str:
    model, optimizer = build()
    for iteration in range(STEPS):
        mt.step(model, optimizer, iteration)
    mt.save(FORMAT, model, optimizer, options.out / "checkpoint")
    return "saved"


def load(rank: int, options: argparse.Namespace) -> str:
    model, optimizer = build()
    try:
        mt.load(FORMAT, model, optimizer, options.out / "checkpoint")
    except RuntimeError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
