"""Train and resume at every ZeRO stage with the real DeepSpeed on CPU ranks; print the results, as JSON by case.

    zero_resuming.py train FOLDER CASE... --ranks N
    zero_resuming.py resume FOLDER/CASE... --ranks M [--tag universal] [--save NAME]

A case is a kind and the number of param groups: `stage1-2`, or a kind alone. `train` saves in FOLDER/CASE/global_step2
and takes two more steps; beside it are the main parameters and moments at the save (truth.pt), the next losses
(losses.json), and all live states then and at the end (live.pt). With `--universal CHECKPOINT` it starts from that one,
of STEPS steps. `resume` loads into a new run with other weights, reports the differences on any rank, and takes the
same two steps, from `--first 4` on for a checkpoint of the latter; `--case` is that of a folder with another name. With
`--save NAME` it saves at its end in FOLDER/CASE/NAME, with the loaded client state. `--no-states` loads everything
except the optimizer's states. There are `--node N` ranks per node. If a rank fails, the case has only its "error". If
only settings of param groups differ, the two steps use the right ones.
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch

from trainers.deepspeed_training import (
    STEPS,
    TAG,
    differences,
    engine_of,
    groups_of,
    is_weight,
    kind_of,
    load,
    on_any_rank,
    results,
    save,
    snapshot,
    state,
    train,
)
from trainers.ranks import RankError


def begin(rank: int, args: argparse.Namespace) -> dict[str, Any]:
    first = STEPS if args.universal else 0
    run = engine_of(args.case, args.ranks, universal=bool(args.universal), seed=0)
    if args.universal:
        load(run, args.universal.parent, args.universal.name)
    train(run, rank, args.ranks, first=first)
    for group in groups_of(run):
        group["lr"] /= 2  # as by a scheduler, so that it differs from the next run's initial rate
    save(run, args.folder)
    truth, saved = state(run), snapshot(run)
    losses = train(run, rank, args.ranks, first=first + STEPS)
    live = {"saved": saved, "losses": losses, "end": snapshot(run)}
    if rank == 0:
        torch.save(truth, args.folder / "truth.pt")
        torch.save(live, args.folder / "live.pt")
        (args.folder / "losses.json").write_text(json.dumps(losses))
    return {"optimizer": type(run.optimizer).__name__}


def resume(rank: int, args: argparse.Namespace) -> dict[str, Any]:
    live = torch.load(args.folder / "live.pt", weights_only=False)
    run = engine_of(args.case, args.ranks, universal=not args.tag.startswith("global_step"), seed=1)
    client_state = load(run, args.folder, args.tag, **args.asked)
    states = snapshot(run)
    different = on_any_rank(differences(states, live["saved"]))
    if different and all(kind_of(name) == "group" for name in different):  # to see what else is wrong
        for number, group in enumerate(groups_of(run)):
            saved = {key: live["saved"].get(f"group {number}.{key}") for key in group}
            group.update({key: value for key, value in saved.items() if value is not None})
    masters_are_weights = all(is_weight(states, name) for name in states if kind_of(name) == "fp32")
    found = {"different": different, "masters are weights": masters_are_weights, "steps": states["steps"]}
    losses = train(run, rank, args.ranks, first=args.first)
    if args.save:
        run.save_checkpoint(str(args.folder / args.save), tag=TAG, client_state=client_state)
    end = on_any_rank(differences(snapshot(run), live["end"]))
    return {**found, "losses": losses, "expected": live["losses"], "different_end": end}


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    training, resuming = commands.add_parser("train"), commands.add_parser("resume")
    training.set_defaults(do=begin, case="")
    training.add_argument("folder", type=Path)
    training.add_argument("--universal", type=Path, metavar="CHECKPOINT")
    resuming.set_defaults(do=resume, folder=Path())
    resuming.add_argument("--tag", default=TAG)
    resuming.add_argument("--case", default="")
    resuming.add_argument("--first", type=int, default=STEPS)
    resuming.add_argument("--save", metavar="NAME")
    without = {"load_optimizer_states": False}
    resuming.add_argument("--no-states", dest="asked", action="store_const", const=without, default={})
    for command in (training, resuming):
        command.add_argument("cases", nargs="+")
        command.add_argument("--ranks", type=int, required=True)
        command.add_argument("--node", type=int)
    args = parser.parse_args()
    found = {}
    for case in args.cases:
        one = copy.copy(args)
        one.folder = args.folder / case
        one.case = args.case or one.folder.name
        try:
            found[case] = results(args.do, args.ranks, one, node=args.node)[0]
        except RankError as error:
            found[case] = {"error": error.full}
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
