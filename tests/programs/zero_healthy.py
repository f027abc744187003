"""Write complete checkpoints of many small runs with the real DeepSpeed, each with random valid options.

    zero_healthy OUT --seed 0 --count 50 --ranks 2       OUT/NUMBER/global_stepN, and OUT/NUMBER/options.json

Random options are the stage, the dtype, the optimizer, param groups, and unusual but healthy features: frozen, unused,
tied and zero-initialized parameters, a learning rate of 0, warm-up, masks of -inf, overflows, no step at all.
"""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import deepspeed
import torch

from program_arguments import parsed
from trainers.deepspeed_training import results

HIDDEN = 8
OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "AMSGrad": lambda groups, lr: torch.optim.AdamW(groups, lr=lr, amsgrad=True),
    "SGD": torch.optim.SGD,
    "momentum": lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
    "NAdam": torch.optim.NAdam,
}


# The options of a run without random ones.
PLAIN: dict[str, Any] = {
    "stage": 1, "dtype": "bf16", "optimizer": "AdamW", "groups": 2, "accumulation": 1,
    **dict.fromkeys(
        (
            "zero_rate", "warm_up", "frozen", "unused", "tied", "zero_initialized", "mask", "overflow", "round_robin",
            "sub_groups", "lora",
        ),
        False,
    ),
}  # fmt: skip


def drawn(generator: random.Random) -> dict[str, Any]:
    """The options of one run."""

    def one_in(count: int) -> bool:
        return generator.randrange(count) == 0

    stage = generator.choice([0, 1, 1, 2, 2, 3, 3])
    return {
        "stage": stage,
        "dtype": generator.choice(["bf16", "bf16", "fp16"]),
        "optimizer": generator.choice([*["AdamW"] * 4, *OPTIMIZERS]),
        "groups": 1 if stage == 3 and one_in(2) else generator.choice([1, 2, 3]),
        "zero_rate": one_in(4),  # for the last group
        "warm_up": one_in(4),
        "steps": generator.choice([0, 1, 1, 2, 3, 5]),
        "frozen": one_in(3),
        "unused": one_in(3),
        "tied": one_in(4),
        "zero_initialized": one_in(2),
        "mask": one_in(3),
        "overflow": one_in(4),  # in fp16, the first steps are skipped
        "round_robin": stage in (1, 2) and one_in(4),
        "sub_groups": stage == 3 and one_in(3),
        "accumulation": generator.choice([1, 1, 2]),
    }


class Model(torch.nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.up = torch.nn.Linear(HIDDEN, 4 * HIDDEN)
        self.norm = torch.nn.LayerNorm(4 * HIDDEN)
        self.down = torch.nn.Linear(4 * HIDDEN, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.again = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        if options["tied"]:
            self.again.weight = self.head.weight
        if options["unused"]:
            self.unused = torch.nn.Linear(HIDDEN, 3)
        if options["zero_initialized"]:
            torch.nn.init.zeros_(self.down.bias)
            torch.nn.init.zeros_(self.head.weight)
        if options["frozen"]:
            self.norm.requires_grad_(False)
        if options["mask"]:
            self.register_buffer("mask", torch.full((HIDDEN, HIDDEN), float("-inf")).triu(1))
        if options.get("lora"):  # adapters of rank 2 whose second matrix starts at zero; nothing else is trained
            self.requires_grad_(False)
            self.lora_a = torch.nn.Linear(4 * HIDDEN, 2, bias=False)
            self.lora_b = torch.nn.Linear(2, HIDDEN, bias=False)
            torch.nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.norm(torch.tanh(self.up(x)))
        x = self.down(wide)
        if hasattr(self, "lora_b"):
            x = x + self.lora_b(self.lora_a(wide))
        return self.again(x + self.head(x))


def engine(options: dict[str, Any], rate: float = 1e-2) -> Any:
    model = Model(options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained[n :: options["groups"]]} for n in range(options["groups"])]
    if options["zero_rate"]:
        groups[-1]["lr"] = 0.0
    optimizer = OPTIMIZERS[options["optimizer"]](groups, lr=rate)
    zero = {"stage": options["stage"], "reduce_bucket_size": 1000, "round_robin_gradients": options["round_robin"]}
    if options["sub_groups"]:
        zero["sub_group_size"] = 100
    fp16 = {"enabled": True, "initial_scale_power": 24 if options["overflow"] else 4, "hysteresis": 1}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": options["accumulation"],
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        **({"fp16": fp16} if options["dtype"] == "fp16" else {"bf16": {"enabled": True}}),
        **({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}} if options["warm_up"] else {}),
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train_and_save(options: dict[str, Any], folder: Path) -> None:
    run = engine(options)
    dtype = next(run.module.parameters()).dtype
    for _ in range(options["steps"] * options["accumulation"]):
        loss = (run(torch.randn(2, HIDDEN).to(dtype)).float() - 1).pow(2).mean()
        run.backward(loss)
        with torch.no_grad():
            run.step()
    run.save_checkpoint(str(folder), client_state={"universal_checkpoint_info": {}})


def train(run: Any, seeds: Iterable[int]) -> None:
    """Train one step per seed."""
    for seed in seeds:
        samples = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()
        run.backward((run(samples).float() - 1).pow(2).mean())
        with torch.no_grad():
            run.step()


def write(rank: int, out: str, seed: int, count: int) -> list[str]:
    """Write the runs; return the errors of those that DeepSpeed refuses, which are equal on all ranks."""
    refused = []
    for number in range(count):
        options = drawn(random.Random(f"{seed}-{number}"))
        torch.manual_seed(number)
        folder = Path(out, str(number))
        try:
            train_and_save(options, folder)
        except Exception as error:  # a limit of DeepSpeed, not of a checkpoint: equal on all ranks
            refused.append(f"{number}: {type(error).__name__}: {error}")
            continue
        if rank == 0:
            (folder / "options.json").write_text(json.dumps(options))
    return refused


def main() -> None:
    args = parsed({"out": Path}, seed=0, count=50, ranks=2)
    print(json.dumps({"refused": results(write, args.ranks, str(args.out), args.seed, args.count)[0]}))


if __name__ == "__main__":
    main()
