"""Run two ranks of the real DeepSpeed, whose second ends during a save, then a run that loads what `latest` names.

save OUT KIND      one complete checkpoint, and another step's, which the second rank does not write; prints the final
                   content of `latest`
whole OUT KIND     one rank, given by RANK and MASTER_PORT, of a complete save, which it begins after
                   LATEST_TOO_EARLY_LATE seconds; prints its error
resume OUT KIND    each rank prints the tag that it loaded, its error, and whether its moments are all zeros
"""

import argparse
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

from patience import seconds
from program_arguments import parsed
from trainers import deepspeed_training as zt
from trainers.ranks import free_port

RANKS = 2
LATE = seconds(3)  # from the first rank's last file to the time at which it would have written `latest`


def save(rank: int, args: argparse.Namespace) -> None:
    run = zt.engine_of(args.kind, RANKS, universal=False)
    zt.train(run, rank, RANKS, first=0)
    run.save_checkpoint(str(args.out), tag="first")
    zt.train(run, rank, RANKS, first=zt.STEPS)
    if rank == 1:
        run.checkpoint_engine.save = end
    run.save_checkpoint(str(args.out), tag="second")


def whole(rank: int, args: argparse.Namespace) -> None:
    run, error = zt.engine_of(args.kind, RANKS, universal=False), ""
    time.sleep(float(os.environ.get("LATEST_TOO_EARLY_LATE", "0")))
    try:
        run.save_checkpoint(str(args.out), tag="first")
    except RuntimeError as raised:
        error = str(raised).splitlines()[0]
    say({"rank": rank, "error": error})
    time.sleep(seconds(1))  # rank 0 holds the store, which the other rank reads at the same time
    os._exit(0)  # as a job with a failed rank ends


def end(state: Any, path: str, *args: Any, **kwargs: Any) -> None:
    while not list(Path(path).parent.glob("*_optim_states.pt")):  # the first rank's file
        time.sleep(0.05)
    time.sleep(LATE)
    os._exit(3)


def resume(rank: int, args: argparse.Namespace) -> None:
    run = zt.engine_of(args.kind, RANKS, universal=False)
    found: dict[str, Any] = {"rank": rank, "error": ""}
    try:
        path, _ = run.load_checkpoint(str(args.out))
        found["tag"] = Path(path).parent.name
        states = run.optimizer.optimizer.state.values()
        found["no moments"] = not any(bool(state["exp_avg"].any()) for state in states if "exp_avg" in state)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    say(found)
    os._exit(0)  # ranks that differ would wait for each other


def say(found: dict[str, Any]) -> None:
    """Write in one call: both ranks share the output."""
    os.write(1, f"{json.dumps(found)}\n".encode())


def main() -> None:
    args = parsed({"work": str, "out": Path, "kind": str})
    args.ranks = RANKS
    is_save, args.work = args.work == "save", {"save": save, "whole": whole, "resume": resume}[args.work]
    zt.prepare()
    if args.work is whole:
        zt.rank_main(int(os.environ["RANK"]), int(os.environ["MASTER_PORT"]), args)
    port = free_port()
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=zt.rank_main, args=(rank, port, args)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if is_save:
        codes = [process.exitcode for process in ranks]
        print(json.dumps({"latest": (args.out / "latest").read_text(), "codes": codes}))


if __name__ == "__main__":
    main()
