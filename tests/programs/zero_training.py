"""Train a tiny model with the real DeepSpeed on CPU ranks: write checkpoints, or resume from one.

    write OUT --ranks 8 KIND...        OUT/KIND/global_step2, and beside it truth.pt, losses.json, end.pt
    resume FOLDER TAG KIND --ranks 4   prints the state after the load against truth.pt, the losses from there, and the
                                       state after these steps against end.pt

`write --universal FOLDER` starts from that universal checkpoint, of STEPS steps; a resume from its checkpoint is
`--first 4`. `--node N` means N ranks per node.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from trainers.deepspeed_training import (
    KINDS,
    STEPS,
    differences,
    engine,
    on_ranks,
    save,
    snapshot,
    state,
    train,
)


def write(rank: int, args: argparse.Namespace) -> None:
    for kind in args.kinds:
        first = STEPS if args.universal else 0
        run = engine(kind, args.ranks, universal=bool(args.universal))
        if args.universal:
            run.load_checkpoint(str(args.universal.parent), tag=args.universal.name)
        train(run, rank, args.ranks, first=first)
        save(run, args.folder / kind)
        truth = state(run)
        losses = train(run, rank, args.ranks, first=first + STEPS)
        end = snapshot(run)
        if rank == 0:
            torch.save(truth, args.folder / kind / "truth.pt")
            torch.save(end, args.folder / kind / "end.pt")
            (args.folder / kind / "losses.json").write_text(json.dumps(losses))


def resume(rank: int, args: argparse.Namespace) -> None:
    run = engine(args.kind, args.ranks, universal=not args.tag.startswith("global_step"))
    run.load_checkpoint(str(args.folder), tag=args.tag)
    truth, found = torch.load(args.folder / "truth.pt"), state(run)
    different = [name for name in truth if differences(found[name], truth[name])]
    losses = train(run, rank, args.ranks, first=args.first)
    end = torch.load(args.folder / "end.pt", weights_only=False)
    result = {"different": different, "losses": losses, "different_end": differences(snapshot(run), end)}
    if rank == 0:
        args.result.write_text(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    writing = commands.add_parser("write")
    writing.set_defaults(work=write)
    writing.add_argument("folder", type=Path)
    writing.add_argument("kinds", nargs="+", choices=KINDS)
    writing.add_argument("--universal", type=Path, metavar="FOLDER")
    resuming = commands.add_parser("resume")
    resuming.set_defaults(work=resume)
    resuming.add_argument("folder", type=Path)
    resuming.add_argument("tag")
    resuming.add_argument("kind", choices=KINDS)
    resuming.add_argument("--first", type=int, default=STEPS)
    for command in (writing, resuming):
        command.add_argument("--ranks", type=int, default=8)
        command.add_argument("--node", type=int)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        args.result = Path(folder, "resumed.json")
        on_ranks(args)
        print(args.result.read_text() if args.work is resume else "{}")


if __name__ == "__main__":
    main()
