"""Write complete checkpoints of small runs with the real megatron-core.

    megatron_healthy OUT --ranks 4 --cases CASES.json        OUT/NUMBER/iter_000000N for each list item: options to set

Options are the ranks of each kind, the format, the dtype, the optimizer, and unusual but healthy features: frozen,
unused, tied and zero-initialized parameters, a learning rate of 0, warm-up, masks of -inf, overflows, no step at all.
The explorer (tests/explore) draws runs.
"""

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import torch

from megatron_saving import SEEN, VOCABULARY, save
from program_arguments import parsed
from trainers import megatron_training as mt

HIDDEN = 12
RATE = 1e-2
AT_ONCE = 8  # runs per process: Gloo keeps the threads of every group
# The options of a run without random ones.
PLAIN: dict[str, Any] = {
    "tp": 1, "pp": 1, "backend": "torch_dist", "format": "fully_reshardable", "optimizer": "adam", "whole": False,
    "dtype": "bf16", "steps": 3, "rate": RATE, "weight_decay": 0.1, "scale": 16.0, "bucket_size": None,
    **dict.fromkeys(("warm_up", "frozen", "unused", "tied", "zero_initialized", "mask"), False),
}  # fmt: skip


def make_model(options: dict[str, Any], config: Any, dtype: torch.dtype) -> Any:
    """This rank's pipeline stage of an embedding, a block and a head."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from megatron.core.transformer.module import MegatronModule

    config.use_cpu_initialization = True
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()

    def initialize(weight: torch.Tensor) -> None:
        torch.nn.init.normal_(weight, std=0.3)

    linear = {"config": config, "init_method": initialize, "bias": True, "skip_bias_add": False}

    class Model(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            if first:
                self.embedding = VocabParallelEmbedding(VOCABULARY, HIDDEN, init_method=initialize, config=config)
                self.up = ColumnParallelLinear(HIDDEN, 4 * HIDDEN, gather_output=False, **linear)
                self.down = RowParallelLinear(4 * HIDDEN, HIDDEN, input_is_parallel=True, **linear)
                self.up.requires_grad_(not options["frozen"])
            if last:
                self.norm = torch.nn.LayerNorm(HIDDEN)
                self.head = torch.nn.Linear(HIDDEN, HIDDEN)
                self.again = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
                if options["tied"]:
                    self.again.weight = self.head.weight
                if options["zero_initialized"]:
                    torch.nn.init.zeros_(self.head.weight)
                if options["unused"]:
                    self.unused = torch.nn.Linear(HIDDEN, 3)
                if options["mask"]:
                    self.register_buffer("mask", torch.full((HIDDEN, HIDDEN), float("-inf")).triu(1))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = torch.nn.functional.one_hot(tokens % HIDDEN, HIDDEN).to(dtype)
            if first:
                x = self.embedding(tokens)
                x = x + self.down(torch.nn.functional.gelu(self.up(x)[0]))[0]
            if last:
                x = self.norm(x)
                x = self.again(x + self.head(x))
            return x

    return Model().to(dtype)


def train_and_save(options: dict[str, Any], ranks: int, folder: Path) -> None:
    settings = {
        "optimizer": options["optimizer"],
        "lr": options["rate"],
        "min_lr": 0.0,
        "weight_decay": options["weight_decay"],
        "initial_loss_scale": options["scale"],
        "use_distributed_optimizer": not options["whole"],
    }
    model, optimizer = mt.build(
        fp16=options["dtype"] == "fp16",
        bucket_size=options["bucket_size"],
        make_model=lambda config, dtype, _: make_model(options, config, dtype),
        settings=settings,
    )
    scheduler = warm_up(optimizer, options) if options["warm_up"] else None
    for number in range(options["steps"]):
        mt.update(model, optimizer, functools.partial(loss, model, 1000 * options.get("seed", 0) + number))
        if scheduler:
            scheduler.step(1)
    chosen = {name: options[name] for name in ("tp", "pp", "backend", "format", "dtype")}
    own = argparse.Namespace(ranks=ranks, **chosen)
    save(model, optimizer, options["steps"], folder / f"iter_{options['steps']:07}", own)


def loss(model: Any, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    found: torch.Tensor = model(2 * torch.randint(0, SEEN // 2, (4, 16), generator=generator).cuda())
    return (found.float() - 1).pow(2).mean()


def warm_up(optimizer: Any, options: dict[str, Any]) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    rate, decay = options["rate"], options["weight_decay"]
    return OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=rate, min_lr=0.0, lr_warmup_steps=4, lr_decay_steps=20, lr_decay_style="linear",
        start_wd=decay, end_wd=decay, wd_incr_steps=20, wd_incr_style="constant",
    )  # fmt: skip


def write(rank: int, ranks: int, out: str, options_of: list[tuple[int, Any]]) -> list[str]:
    """Write the runs; return the errors of those that megatron-core refuses, which are equal on all ranks."""
    from megatron.core import parallel_state

    mt.use_inner_optimizer("fused")
    refused = []
    for number, given in options_of:
        options = {**PLAIN, **given}
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(options["tp"], options["pp"])
        try:
            train_and_save(options, ranks, Path(out, str(number)))
        except Exception as error:  # a limit of megatron-core, not of a checkpoint: equal on all ranks
            refused.append(f"{number}: {options}: {type(error).__name__}: {error}")
    return refused


def main() -> None:
    args = parsed({"out": Path}, ranks=4, cases=Path)
    refused: list[str] = []
    numbered = list(enumerate(json.loads(args.cases.read_text())))
    for first in range(0, len(numbered), AT_ONCE):
        own = numbered[first : first + AT_ONCE]
        refused += mt.results(write, args.ranks, args.ranks, str(args.out), own)[0]
    print(json.dumps({"refused": refused}))


if __name__ == "__main__":
    main()
