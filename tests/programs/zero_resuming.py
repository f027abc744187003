"""Train and resume at every ZeRO stage with the real DeepSpeed on CPU ranks; print the results, as JSON by case.

    zero_resuming.py train FOLDER CASE... --ranks N
    zero_resuming.py resume FOLDER/CASE... --ranks M [--tag universal] [--save NAME]

With `--save NAME` the run saves at its end in the folder of that name in FOLDER/CASE, with the loaded client state.
With `--node N` there are N ranks per node. `--no-states` loads everything except the optimizer's states. A case is a
kind and the number of param groups: `stage1-2`. `train` saves in FOLDER/CASE/global_step2, takes two more steps, and
writes the run's state at the save and at the end beside it. `resume` loads that into a new run with other weights,
reports the differences on any rank, and takes the same two steps; its output is by the folders as given. If a rank
fails, the case has only its "error". If only settings of param groups differ, the two steps use the right ones.
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
    load,
    on_any_rank,
    results,
    save,
    snapshot,
    train,
)
from trainers.ranks import RankError


def is_settings(name: str) -> bool:
    return name.startswith("group ")


def masters_are_weights(states: dict[str, Any]) -> bool:
    weights = {name.removesuffix(".weight"): value for name, value in states.items() if name.endswith(".weight")}
    return all(states[f"{name}.fp32"].equal(weight.float()) for name, weight in weights.items())


def begin(rank: int, args: argparse.Namespace) -> dict[str, Any]:
    run = engine_of(args.folder.name, args.ranks, universal=False, seed=0)
    train(run, rank, args.ranks, first=0)
    for group in groups_of(run):
        group["lr"] /= 2  # as by a scheduler, so that it differs from the next run's initial rate
    save(run, args.folder)
    truth: dict[str, Any] = {"saved": snapshot(run), "losses": train(run, rank, args.ranks, first=STEPS)}
    truth["end"] = snapshot(run)
    if rank == 0:
        torch.save(truth, args.folder / "truth.pt")
    return {"optimizer": type(run.optimizer).__name__}


def resume(rank: int, args: argparse.Namespace) -> dict[str, Any]:
    truth = torch.load(args.folder / "truth.pt", weights_only=False)
    run = engine_of(args.folder.name, args.ranks, universal=args.tag != TAG, seed=1)
    client_state = load(run, args.folder, args.tag, **args.asked)
    states = snapshot(run)
    different = on_any_rank(differences(states, truth["saved"]))
    if different and all(is_settings(name) for name in different):  # to see what else is wrong
        for number, group in enumerate(groups_of(run)):
            saved = {key: truth["saved"].get(f"group {number}.{key}") for key in group}
            group.update({key: value for key, value in saved.items() if value is not None})
    found = {"different": different, "masters are weights": masters_are_weights(states), "steps": states["steps"]}
    losses = train(run, rank, args.ranks, first=STEPS)
    if args.save:
        run.save_checkpoint(str(args.folder / args.save), tag=TAG, client_state=client_state)
    end = on_any_rank(differences(snapshot(run), truth["end"]))
    return {**found, "losses": losses, "expected": truth["losses"], "different_end": end}


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    training, resuming = commands.add_parser("train"), commands.add_parser("resume")
    training.set_defaults(do=begin)
    training.add_argument("folder", type=Path)
    resuming.set_defaults(do=resume, folder=Path())
    resuming.add_argument("--tag", default=TAG)
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
        try:
            found[case] = results(args.do, args.ranks, one, node=args.node)[0]
        except RankError as error:
            found[case] = {"error": error.full}
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
