"""Resume the real hybrid optimizer, with nothing offloaded, from a checkpoint of a release that saved no step for it.

hybrid_old_step.py OUT save [--steps 5]    OUT/checkpoint after that many steps, OUT/after.pt the weights two later
hybrid_old_step.py OUT load                "right" if the weights two steps after the load equal these, or the error
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from ckpt_patches.demo import megatron_training as mt
from program_arguments import parsed

FORMAT, MORE = "fully_reshardable", 2


def main() -> None:
    options = parsed({"out": Path, "what": str}, steps=5)
    mt.use_inner_optimizer("fused")
    (found,) = mt.results(save if options.what == "save" else load, 1, options)
    print(json.dumps(found))


def build() -> Any:
    return mt.build(offload_fraction=0.0, precision_aware=True)


def save(rank: int, options: argparse.Namespace) -> str:
    model, optimizer = build()
    for iteration in range(options.steps):
        mt.step(model, optimizer, iteration)
    mt.save(FORMAT, model, optimizer, options.out / "checkpoint")
    torch.save({"steps": options.steps, "weights": go_on(model, optimizer, options.steps)}, options.out / "after.pt")
    return "saved"


def load(rank: int, options: argparse.Namespace) -> str:
    after = torch.load(options.out / "after.pt")
    model, optimizer = build()
    mt.set_weights(model, {name: value + 1 for name, value in mt.weights(model).items()})
    try:
        mt.load(FORMAT, model, optimizer, options.out / "checkpoint")
    except RuntimeError as error:
        return str(error)
    found = go_on(model, optimizer, after["steps"])
    return "right" if mt.equal(found, after["weights"]) else "wrong"


def go_on(model: Any, optimizer: Any, iteration: int) -> dict[str, torch.Tensor]:
    for number in range(iteration, iteration + MORE):
        mt.step(model, optimizer, number)
    return mt.weights(model)


if __name__ == "__main__":
    main()
