"""Save the layer-wise distributed optimizer in the `torch` format of the real megatron.training, and load it.

Uses two CPU ranks. Prints a line of JSON: the error of each rank, the names of the optimizer's files, and how many of
its own main parameters and states each rank loaded with other values than it saved. `--lost`: the second file is
deleted before the load, because upstream's save does not write it.

    layer_wise_torch.py OUT [--cp 2] [--lost]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import layer_wise
from gpt_training import gathered
from program_arguments import parsed
from trainers import megatron_lm
from trainers import megatron_training as mt

RANKS = 2


def main() -> None:
    options = parsed({"out": Path}, cp=2, lost=False)
    megatron_lm.import_training()
    dist.all_gather = gathered
    errors, wrong = zip(*mt.results(resume, RANKS, options), strict=True)
    files = sorted(path.name for path in options.out.rglob("layer_wise*"))
    print(json.dumps({"errors": errors, "files": files, "wrong": wrong}), flush=True)


def build() -> tuple[Any, Any]:
    model, of_all = mt.build(make_model=two_alike, settings={"use_distributed_optimizer": False})
    return model, layer_wise.layer_wise(of_all.config, [model])


def resume(rank: int, options: argparse.Namespace) -> tuple[str, int]:
    args = megatron_lm.arguments(
        options.out, 1, 1, ckpt_format="torch", use_dist_ckpt=False, optimizer="dist_muon",
        use_layer_wise_distributed_optimizer=True, context_parallel_size=options.cp,
        data_parallel_size=RANKS // options.cp,
    )  # fmt: skip
    megatron_lm.start(1, 1, None, options.cp)
    checkpointing = megatron_lm.import_training()
    model, optimizer = build()
    mt.step(model, optimizer, 0)
    megatron_lm.save(checkpointing, model, args, optimizer)
    resumed, of_resumed = build()
    if options.lost and rank == 1:
        next(options.out.rglob("layer_wise_optimizer_1.pt")).unlink()
    try:
        megatron_lm.load(checkpointing, resumed, args, of_resumed)
    except (RuntimeError, SystemExit) as error:  # a file that two ranks wrote at once
        return type(error).__name__, 0
    own, loaded = layer_wise.held(model, optimizer), layer_wise.held(resumed, of_resumed)
    return "", sum(not torch.equal(tensor, loaded[name]) for name, tensor in own.items() if " " in name)


def two_alike(config: Any, dtype: torch.dtype, native_fp32: bool) -> Any:
    """A model in which each rank has a matrix and a bias of equal shapes."""
    from megatron.core.transformer.module import MegatronModule

    class Model(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            self.a = torch.nn.Linear(16, 16)
            self.b = torch.nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.b(torch.relu(self.a(x)))
            return out

    return Model().to(dtype)


if __name__ == "__main__":
    main()
