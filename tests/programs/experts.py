"""Train a mixture of experts with DeepSpeed on four ranks, and save it, or load a universal checkpoint of one.

experts.py OUT STAGE [--ep 2]      OUT/global_step8; beside it, each rank's state-RANK.pt, by the experts' numbers,
                                   and losses.json, of the next steps
experts.py OUT STAGE --resume FOLDER          the same, for a run that loads that checkpoint instead of training
experts.py OUT STAGE --ep 4 1 --universal FOLDER      OUT/ep4 and OUT/ep1, each with both files after the load

Stage 0 is ZeRO 1 by BF16_Optimizer. With --groups N a param group of experts has at most N elements.
"""

import argparse
import json
from pathlib import Path

import torch

from trainers import deepspeed_training
from trainers.experts_training import MORE, RANKS, STEPS, engine, state, train


def work(rank: int, args: argparse.Namespace) -> None:
    for ep in args.ep:
        run, out = engine(ep, args.stage, bool(args.universal), args.groups), args.out
        if args.universal:
            run.load_checkpoint(str(args.universal.parent), tag=args.universal.name)
            out = args.out / f"ep{ep}"
        else:
            if args.resume:
                run.load_checkpoint(str(args.resume.parent), tag=args.resume.name)
            else:
                train(run, rank, range(STEPS))
            run.save_checkpoint(str(out), tag=f"global_step{STEPS}")
        out.mkdir(parents=True, exist_ok=True)
        torch.save(state(run, ep), out / f"state-{rank}.pt")
        losses = train(run, rank, range(STEPS, STEPS + MORE))
        if rank == 0:
            (out / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("stage", type=int)
    parser.add_argument("--ep", type=int, nargs="+", default=[2])
    parser.add_argument("--groups", type=int, default=10**6)
    parser.add_argument("--universal", type=Path)
    parser.add_argument("--resume", type=Path)
    deepspeed_training.results(work, RANKS, parser.parse_args())
