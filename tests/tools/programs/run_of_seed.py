"""Write the checkpoints of a run that differs from others only in its seed: OUT/global_stepN at the given steps.

run_of_seed OUT --seed 0 --steps 2,50 [--rate 0.01] [--stage 1]
"""

from pathlib import Path

import torch

from program_arguments import parsed
from trainers.deepspeed_options import Model, engine
from trainers.deepspeed_training import groups_of, results
from trainers.options import DEEPSPEED


def train(rank: int, out: str, seed: int, steps: list[int], rate: float, stage: int) -> None:
    run = engine({**DEEPSPEED, "groups": 2, "stage": stage}, {"ranks": 2, "nodes": 1}, seed)
    for group in groups_of(run):
        group["lr"] = rate
    data = torch.Generator().manual_seed(1000 * seed + rank)
    for step in range(1, max(steps) + 1):
        inputs = torch.randn(8, Model.HIDDEN, generator=data)
        loss = (run(inputs.bfloat16()).float() - inputs.roll(1, 1).sin()).pow(2).mean()
        run.backward(loss)
        run.step()
        if step in steps:
            run.save_checkpoint(out)


def main() -> None:
    args = parsed({"out": Path}, seed=0, steps="2,50", rate=0.01, stage=1)
    steps = [int(step) for step in args.steps.split(",")]
    results(train, 2, str(args.out), args.seed, steps, args.rate, args.stage)


if __name__ == "__main__":
    main()
