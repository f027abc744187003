"""Train and resume at every ZeRO stage with the real DeepSpeed on CPU ranks; print the results, as JSON by case.

    zero_resuming.py train FOLDER CASE... --ranks N
    zero_resuming.py resume FOLDER/CASE... --ranks M [--tag universal] [--save NAME]

With `--save NAME` the run saves at its end in the folder of that name in FOLDER/CASE, with the loaded client state.
With `--node N` there are N ranks per node. `--no-states` loads everything except the optimizer's states. A case is a
kind and the number of param groups: `stage1-2`. `train` saves in FOLDER/CASE/global_step2, takes two more steps, and
writes the run's state at the save and at the end beside it. `resume` loads that into a new run with other weights,
reports the differences on any rank, and takes the same two steps; its output is by the folders as given. If a rank
fails, the case has its "error", and the differences if it had loaded by then. If only settings of param groups differ,
the two steps use the right ones.
"""

import argparse
import copy
import json
import multiprocessing
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from patience import seconds
from trainers.deepspeed_training import (
    STEPS,
    TAG,
    differences,
    engine_of,
    groups_of,
    load,
    on_any_rank,
    prepare,
    rank_main,
    reduce_as_on_a_gpu,
    save,
    snapshot,
    train,
)
from trainers.ranks import free_port

# For a rank that does not notice the end of another rank.
PATIENCE = seconds(20)


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
            group.update(truth["saved"][f"group {number}"])
    found = {"different": different, "masters are weights": masters_are_weights(states), "steps": states["steps"]}
    try:
        losses = train(run, rank, args.ranks, first=STEPS)
    except Exception as error:
        return {**found, "error": last_words(error)}
    if args.save:
        run.save_checkpoint(str(args.folder / args.save), tag=TAG, client_state=client_state)
    end = on_any_rank(differences(snapshot(run), truth["end"]))
    return {**found, "losses": losses, "expected": truth["losses"], "different_end": end}


def last_words(error: Exception) -> str:
    traceback.print_exc()
    return f"{type(error).__name__}: {error}"


def work_and_tell(rank: int, args: argparse.Namespace) -> None:
    """Write the outcome to the rank's file: its result, or its error."""
    try:
        told = args.do(rank, args)
    except Exception as error:
        told = {"error": last_words(error)}
    Path(args.told, str(rank)).write_text(json.dumps(told))
    if "error" in told:
        raise SystemExit(1)


def on_ranks(args: argparse.Namespace) -> dict[str, Any]:
    """The result of rank 0; if ranks failed, the first error."""
    context = multiprocessing.get_context("fork")
    port = free_port()
    ranks = [context.Process(target=rank_main, args=(rank, port, args)) for rank in range(args.ranks)]
    for process in ranks:
        process.start()
    died = float("inf")
    while any(process.is_alive() for process in ranks):
        time.sleep(0.02)
        if any(process.exitcode for process in ranks):
            died = min(died, time.monotonic())
        if time.monotonic() > died + PATIENCE:
            for process in ranks:
                process.kill()
    found = [json.loads(path.read_text()) for path in sorted(Path(args.told).iterdir())]
    errors = [one for one in found if "error" in one]
    if not errors and any(process.exitcode for process in ranks):
        errors = [{"error": f"exit statuses {[process.exitcode for process in ranks]}"}]
    # A rank that lost its connection to another one reports that; any other error is the cause.
    causes = [one for one in errors if "gloo/transport" not in one["error"]]
    return dict([*causes, *errors, *found][0])


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
        command.set_defaults(work=work_and_tell)
        command.add_argument("cases", nargs="+")
        command.add_argument("--ranks", type=int, required=True)
        command.add_argument("--node", type=int)
    args = parser.parse_args()
    prepare()
    reduce_as_on_a_gpu()
    found = {}
    for case in args.cases:
        with tempfile.TemporaryDirectory() as told:
            one = copy.copy(args)
            one.folder, one.told = args.folder / case, told
            found[case] = on_ranks(one)
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
