"""Write complete checkpoints of many small runs with the real megatron-core, each with random valid options.

    megatron_healthy OUT --seed 0 --count 50 --ranks 4       OUT/NUMBER/iter_000000N, and OUT/NUMBER/options.json
    megatron_healthy OUT --ranks 4 --cases CASES.json        OUT/NUMBER for each list item: a seed, and options to set

Random options are the ranks of each kind, the format, the dtype, the optimizer, and unusual but healthy features:
frozen, unused, tied and zero-initialized parameters, a learning rate of 0, warm-up, masks of -inf, overflows, no step
at all.
"""

import argparse
import functools
import json
import random
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
NEW = ("fully_reshardable", "dp_reshardable", "dp_zero_gather_scatter")
OLD = ("fully_sharded_model_space", "dp_zero_gather_scatter")


def drawn(generator: random.Random, *, is_new: bool) -> dict[str, Any]:
    """The options of one run."""

    def one_in(count: int) -> bool:
        return generator.randrange(count) == 0

    tp, pp = generator.choice([(1, 1), (1, 1), (2, 1), (1, 2), (2, 2)])
    optimizer = generator.choice(["adam", "adam", "adam", "sgd"])
    whole = optimizer != "adam" or one_in(6)  # each rank has the complete optimizer
    backend = generator.choice(["torch_dist", "torch_dist", "torch" if is_new else "zarr"])
    kind = generator.choice(NEW if is_new else OLD)
    has_taken_none = whole or (kind == OLD[0])  # other cases cannot be saved before the first step
    unused = one_in(3)
    return {
        "tp": tp,
        "pp": pp,
        "backend": "torch_dist" if whole else backend,
        "format": kind,
        "optimizer": optimizer,
        "whole": whole,
        "dtype": generator.choice(["bf16", "bf16", "fp16"]),
        "steps": generator.choice([0, 1, 1, 2, 3, 5] if has_taken_none else [1, 2, 3, 5]),
        "rate": 0.0 if one_in(5) else RATE,
        "weight_decay": 0.0 if one_in(3) else 0.1,
        "scale": 2.0**32
        if has_taken_none and one_in(2)
        else 16.0,  # for fp16; with the larger one the first steps are skipped
        "bucket_size": 300 if one_in(3) and not unused else None,
        "warm_up": one_in(4),
        "frozen": one_in(3),
        "unused": unused,
        "tied": one_in(4),
        "zero_initialized": one_in(2),
        "mask": one_in(3),
    }


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
    from megatron.core import package_info, parallel_state

    mt.use_inner_optimizer("fused")
    refused = []
    is_new = (package_info.MAJOR, package_info.MINOR) >= (0, 15)
    for number, given in options_of:
        options = {**PLAIN, **given} if isinstance(given, dict) else drawn(random.Random(given), is_new=is_new)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(options["tp"], options["pp"])
        folder = Path(out, str(number))
        try:
            train_and_save(options, ranks, folder)
        except Exception as error:  # a limit of megatron-core, not of a checkpoint: equal on all ranks
            refused.append(f"{number}: {options}: {type(error).__name__}: {error}")
            continue
        if rank == 0:
            (folder / "options.json").write_text(json.dumps(options))
    return refused


def main() -> None:
    args = parsed({"out": Path}, seed=0, count=50, ranks=4, cases=Path)
    refused: list[str] = []
    cases = json.loads(args.cases.read_text()) if args.cases else [f"{args.seed}-{n}" for n in range(args.count)]
    numbered = list(enumerate(cases))
    for first in range(0, len(numbered), AT_ONCE):
        own = numbered[first : first + AT_ONCE]
        refused += mt.results(write, args.ranks, args.ranks, str(args.out), own)[0]
    print(json.dumps({"refused": refused}))


if __name__ == "__main__":
    main()
