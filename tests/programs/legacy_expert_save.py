"""Save a `torch` checkpoint of the real megatron.training on CPU ranks, or load it; prints a line of JSON.

It has the error of each rank, the names of the files, and whether each rank has its own weights.

    legacy_expert_save.py save|load OUT [--ranks 2] [--tp 1] [--ep 1] [--etp 1] [--experts 6] [--saved-etp 0]

`--saved-etp`: another number of expert-tensor-parallel ranks for the arguments.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from program_arguments import parsed
from trainers import megatron_lm
from trainers import megatron_training as mt


def main() -> None:
    options = parsed({"what": str, "out": Path}, ranks=2, tp=1, ep=1, etp=1, experts=6, saved_etp=0)
    megatron_lm.import_training()
    found = mt.results(caught, options.ranks, {"save": save, "load": load}[options.what], options)
    errors, right = zip(*found, strict=True)
    files = sorted(str(path.relative_to(options.out)) for path in options.out.rglob("*.pt"))
    print(json.dumps({"errors": errors, "right": right, "files": files}), flush=True)


def caught(rank: int, run: Callable[[argparse.Namespace], bool], options: argparse.Namespace) -> tuple[str, bool]:
    try:
        return "", run(options)
    except RuntimeError as error:
        return str(error), False


def begin(options: argparse.Namespace) -> tuple[Any, Any, Any]:
    layout = options.tp, options.ep, options.etp
    more = {"ckpt_format": "torch", "use_dist_ckpt": False, "num_experts": options.experts}
    args = megatron_lm.arguments(options.out, *layout, **more)
    args.expert_tensor_parallel_size = options.saved_etp or options.etp
    megatron_lm.start(*layout)
    model = mt.tiny_model(mt.transformer_config(torch.bfloat16), torch.bfloat16, False)
    return megatron_lm.import_training(), model, args


def value() -> int:
    """The value of this rank's weights."""
    from megatron.core import parallel_state as mpu

    return int(mpu.get_tensor_model_parallel_rank() + 10 * mpu.get_expert_model_parallel_rank())


def save(options: argparse.Namespace) -> bool:
    checkpointing, model, args = begin(options)
    mt.set_weights(model, {name: torch.full_like(p, value()) for name, p in model.named_parameters()})
    megatron_lm.save(checkpointing, model, args)
    return True


def load(options: argparse.Namespace) -> bool:
    checkpointing, model, args = begin(options)
    megatron_lm.load(checkpointing, model, args)
    return all(bool((p == value()).all()) for p in model.parameters())


if __name__ == "__main__":
    main()
