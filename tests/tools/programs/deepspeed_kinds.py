"""Train small models with the real DeepSpeed, each as a case has it, and save each twice.

    deepspeed_kinds CASES.json --ranks 2

A case is a dict with a seed, a folder, and options of trainers/options.py, or with a `model` of its own: `tokens`, with
the first `seen` tokens and `experts` experts in use, `pipeline`, or `moe`. FOLDER/earlier is the save one step before
FOLDER/judged. With `later`, 2,000 steps follow in which half of the tokens and an expert fall silent.
"""

import functools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch

import token_model
from program_arguments import parsed
from trainers import deepspeed_options, experts_training
from trainers import deepspeed_training as training
from trainers.options import DEEPSPEED

LATER = 2000
STEPS = 3


def of_package(package: str, name: str, groups: Any, **settings: Any) -> Any:
    return getattr(__import__(package, fromlist=[name]), name)(groups, **settings)


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "beta1 0": functools.partial(torch.optim.AdamW, betas=(0.0, 0.99)),
    "Adamax": torch.optim.Adamax,
    "AdamW8bit": functools.partial(of_package, "bitsandbytes.optim", "AdamW8bit", min_8bit_size=64),
    "Prodigy": lambda groups, lr: of_package("pytorch_optimizer", "Prodigy", groups),
    **{
        name: functools.partial(of_package, "pytorch_optimizer", name)
        for name in ("Lion", "StableAdamW", "AdaBelief", "ScheduleFreeAdamW")
    },
}


class OfTokens:
    """A run of the model of tokens; gradients of what was not used are zeros, as DeepSpeed's buffers have them."""

    def __init__(self, case: dict[str, Any]) -> None:
        torch.manual_seed(case["seed"])
        model = token_model.Model()
        self.seen, self.experts = case.get("seen", token_model.VOCABULARY), case.get("experts", token_model.EXPERTS)
        kinds = deepspeed_options.OPTIMIZERS | OPTIMIZERS
        optimizer = kinds[case.get("optimizer", "AdamW")](model.parameters(), lr=1e-2)
        offload = {"offload_optimizer": {"device": "cpu"}} if case.get("offload") else {}
        more = {"zero_force_ds_cpu_optimizer": False} if offload else {}
        zero = {"stage": case["stage"], "reduce_bucket_size": 1000, **offload}
        dtypes: dict[str, dict[str, Any]] = {"fp16": training.FP16, "bf16": training.BF16, "fp32": {}}
        settings = training.config(2, False, {"zero_optimization": zero}, dtypes[case.get("dtype", "bf16")], more)
        self.engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]

    def train(self, seed: int, steps: int, seen: int = 0, experts: int = 0) -> None:
        rank = torch.distributed.get_rank()
        for step in range(steps):
            generator = torch.Generator().manual_seed(1_000_003 * seed + 2 * step + rank)
            loss = token_model.loss_of(self.engine, generator, seen or self.seen, experts=experts or self.experts)
            self.engine.backward(loss)
            with torch.no_grad():
                self.engine.step()


def of_tokens(case: dict[str, Any]) -> None:
    run = OfTokens(case)
    run.train(case["seed"], STEPS)
    if case.get("later"):
        half = token_model.VOCABULARY // 2
        run.train(case["seed"] + 1, LATER, seen=half, experts=token_model.EXPERTS - 1)
    else:
        run.engine.save_checkpoint(f"{case['folder']}/earlier", client_state={"universal_checkpoint_info": {}})
        run.train(case["seed"] + 2, 1)
    run.engine.save_checkpoint(f"{case['folder']}/judged", client_state={"universal_checkpoint_info": {}})


def of_options(case: dict[str, Any]) -> None:
    """A run of these options, twice, once with one step more."""
    options = {**DEEPSPEED, "groups": 2, **case}
    on = {"ranks": torch.distributed.get_world_size(), "nodes": 1}
    for more, name in enumerate(("earlier", "judged")):
        run = deepspeed_options.engine(options, on, case["seed"])
        deepspeed_options.train(run, options, 100 * case["seed"], case.get("steps", STEPS) + more)
        run.save_checkpoint(f"{case['folder']}/{name}", client_state={"universal_checkpoint_info": {}})


def pipeline(case: dict[str, Any]) -> None:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    run = training.engine_of("pipeline", ranks, universal=False)
    for name in ("earlier", "judged"):
        training.train(run, rank, ranks, first=100 * case["seed"])
        run.save_checkpoint(f"{case['folder']}/{name}")


def moe(case: dict[str, Any]) -> None:
    run = experts_training.engine(2, case["stage"], universal=False)
    rank, first = torch.distributed.get_rank(), 100 * case["seed"]
    experts_training.train(run, rank, range(first, first + STEPS))
    run.save_checkpoint(f"{case['folder']}/judged")


MODELS = {"tokens": of_tokens, "pipeline": pipeline, "moe": moe}


def write(rank: int, cases: list[dict[str, Any]]) -> list[str]:
    """Write the runs; return the errors of those that DeepSpeed refuses, which are equal on all ranks."""
    refused = []
    deepspeed_options.OPTIMIZERS.update(OPTIMIZERS)
    for case in cases:
        try:
            MODELS.get(case.get("model", ""), of_options)(case)
        except Exception as error:  # a limit of DeepSpeed or a missing package, not of a checkpoint
            refused.append(f"{case['kind']}, seed {case['seed']}: {type(error).__name__}: {str(error)[:150]}")
            shutil.rmtree(case["folder"], ignore_errors=True)
    return refused


def main() -> None:
    sys.path.append(os.environ.get("FURTHER_PACKAGES", ""))
    args = parsed({"cases": Path}, ranks=2)
    print(json.dumps({"refused": training.results(write, args.ranks, json.loads(args.cases.read_text()))[0]}))


if __name__ == "__main__":
    main()
