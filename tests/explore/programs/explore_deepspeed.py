"""Train and save one configuration of the explorer with the real DeepSpeed on CPU ranks, or load and judge it.

    explore_deepspeed.py train CASE.json FOLDER     writes two saves, FOLDER/first and FOLDER/last, and FOLDER/truth.pt
    explore_deepspeed.py convert FOLDER OUTPUT      runs DeepSpeed's converter
    explore_deepspeed.py load CASE.json FOLDER      prints the result of the load as JSON

The truth is the content of the optimizer's memory. This program reads it without any accessor of DeepSpeed or ours.
"""

import functools
import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import explored
from explored import FIRST, LAST, Options, SaveFailed
from trainers import deepspeed_training as dt
from trainers import judge, ranks
from trainers.deepspeed_options import engine, patterns, train
from trainers.deepspeed_state import NUMBERS, inner_optimizer, is_weight, kind_of, live, parts, put
from trainers.judge import State, alike, is_nothing

MORE = 2  # the number of steps after the load
# The arguments of a load, and the kinds that it must restore. All other kinds must stay unchanged.
WEIGHTS = ("weight", "buffer")
PROMISES: dict[str, tuple[dict[str, bool], tuple[str, ...]]] = {
    "everything": ({}, ("",)),
    "module only": ({"load_module_only": True}, WEIGHTS),
    "without optimizer states": ({"load_optimizer_states": False}, (*WEIGHTS, "counter", "scheduler")),
    "without scheduler": (
        {"load_lr_scheduler_states": False},
        (*WEIGHTS, "fp32", "state", "group", *NUMBERS, "counter", "scaler"),
    ),
}


def begin(rank: int, case: Options, folder: Path) -> Options:
    options = case["run"]
    run = engine(options, case, seed=0)
    train(run, options, 0, options["steps"])
    for group in inner_optimizer(run).param_groups:
        if not options["warm_up"]:
            group["lr"] /= 2  # as a user's scheduler does; the next run starts with another rate
    truth: State = {}
    at = options["steps"]
    for tag, more in ((FIRST, 1), (LAST, MORE)):
        if tag == LAST and case["killed"]:
            truth[tag] = {"saved": live(run), "at": at}
            keep(rank, folder, truth)
        info: Options = {"iteration": at}
        if not options["experts"]:  # some releases reserve this key for runs with experts
            of_slices = patterns(options) if options["tp"] > 1 else {}
            info["universal_checkpoint_info"] = {"universal_checkpoint_version": 0.2, **of_slices}
        killed = case["killed"] if tag == LAST else 0
        save = ending(rank, killed, case["ranks"]) if killed else explored.saver(case, tag, rank)
        try:
            with mock.patch("torch.save", save):
                run.save_checkpoint(str(folder), tag=tag, client_state=info)
        except Exception as error:
            raise SaveFailed(f"{type(error).__name__}: {error}") from error
        truth[tag] = {"saved": live(run), "at": at}
        if options["ends_at_save"] and tag == (LAST if case["two_saves"] else FIRST):
            run.destroy()
            break
        truth[tag]["losses"] = train(run, options, at, more)
        truth[tag]["end"] = live(run)
        at += more
        if not case["two_saves"]:
            break
    keep(rank, folder, truth)
    return {"optimizer": type(run.optimizer).__name__}


def keep(rank: int, folder: Path, truth: State) -> None:
    if rank == 0:
        torch.save(truth, folder / "truth.pt")
    dist.barrier()


def ending(rank: int, killed: int, ranks: int) -> Callable[..., None]:
    """Return a `torch.save` that, on one rank, writes half of a file and then kills its process as the kernel does."""
    save, left = torch.save, iter(range((killed - 1) // ranks, -1, -1))

    def save_or_end(obj: Any, f: Any, *args: Any, **keywords: Any) -> None:
        if rank != (killed - 1) % ranks or next(left, -1) != 0:
            save(obj, f, *args, **keywords)
            return
        save(obj, whole := io.BytesIO(), *args, **keywords)
        half = whole.getvalue()[: whole.tell() // 2]
        if hasattr(f, "write"):
            f.write(half)
            f.flush()
        else:
            Path(f).write_bytes(half)
        os.kill(os.getpid(), signal.SIGKILL)

    return save_or_end


def load(rank: int, case: Options, folder: Path) -> Options:
    """Load, and return the differences from the truth on any rank and in the losses of the next steps."""
    wanted = case["load"]
    options = {**case["run"], "groups": case["run"]["groups"] + wanted["more_groups"]}
    options["pipeline"] = wanted["stages"] or options["pipeline"]
    options["tp"] = wanted["tp"] or options["tp"]
    universal = "universal" in wanted["kind"]
    run = engine(options, wanted, seed=1, universal=universal)
    if wanted["trained"]:  # the run has trained before, as in a trainer that rolls back
        train(run, options, 50, 1)
    asked, restored = PROMISES[wanted["restore"]]
    name = f"{wanted['tag']}_universal" if universal else wanted["tag"]
    if wanted["latest"]:
        name = (folder / ("latest_universal" if universal else "latest")).read_text()
    for number in range(wanted["times"]):
        if number:  # a rollback
            train(run, options, 60, 1)
        before = live(run)
        with explored.proof() as proof:
            path, _ = run.load_checkpoint(str(folder), tag=None if wanted["latest"] else name, **asked)
        if path is None:
            raise FileNotFoundError("load_checkpoint returns no path")
    if wanted.get("spoil"):  # for tests: change the loaded state, or make a rank hang
        explored.spoil(parts(run), wanted["spoil"])
    truths = torch.load(folder / "truth.pt", weights_only=False)
    # If a save killed a rank, the tracker names the previous save or this save. Otherwise it names the last save.
    truth = truths[name.removesuffix("_universal") if case["killed"] else wanted["tag"]]
    found = live(run)
    different = judge.on_any_rank(differences(found, truth["saved"], before, restored))
    if wanted["repaired"]:
        train(run, options, 70, 1)
        return {"different": explored.unrepaired(different, found, truths, case), "proof": proof}
    if different or restored[0] or "losses" not in truth:
        train(run, options, 70, 1)  # an error here is an error for the user
        return {"different": different, "proof": proof}
    losses, end = truth["losses"], truth["end"]
    names = ("pipeline", "tp")
    other_layout = wanted["ranks"] != case["ranks"] or any(options[name] != case["run"][name] for name in names)
    if other_layout or wanted["old"]:  # another layout changes the order of sums; the fixes also change steps
        reference = engine(options, wanted, seed=2)
        if any(kind_of(name) == "state" for name in truth["saved"]):
            train(reference, options, 90, 2)  # a fresh optimizer has no states yet
        put(reference, truth["saved"])
        losses, end = train(reference, options, truth["at"], len(losses)), live(reference)
    differ = ["next loss"] * (train(run, options, truth["at"], len(losses)) != losses)
    later = judge.on_any_rank(judge.different(live(run), end))
    return {"different": differ + [f"later {name}" for name in later], "proof": proof}


def differences(found: State, saved: State, before: State, restored: tuple[str, ...]) -> list[str]:
    """Return the restored entries that differ from the save and the other entries that differ from before the load."""
    different = []
    for key in sorted({*saved, *found}):
        if not restored[0] or kind_of(key).startswith(restored):
            good = alike(found.get(key), saved.get(key))
        elif kind_of(key) == "fp32":  # main parameters may match the new weights or the checkpoint
            good = alike(found.get(key), saved.get(key)) or is_weight(found, key)
        else:
            good = alike(found.get(key), before.get(key)) or is_nothing(found.get(key), before.get(key))
        different += [] if good else [key]
    return different


def convert(checkpoint: Path, output: Path) -> Options:
    """Call DeepSpeed's converter in a separate process. With the fixes, it hands over to ours."""
    try:
        ranks.results(functools.partial(dt.convert_by_upstream, handed_over=True), 1, checkpoint, output)
    except ranks.RankError as error:
        return {"error": str(error)}
    return {}


def join(nodes: int, rank: int, count: int, port: int) -> None:
    node = count // nodes
    os.environ["CROSS_RANK"], os.environ["CROSS_SIZE"] = str(rank // node), str(nodes)  # writers read these
    dt.join(rank, count, node, port)


def main() -> None:
    args = explored.arguments("train", "convert", "load").parse_args()
    if args.command == "convert":
        print("\n" + json.dumps(convert(args.case, args.folder)))
        return
    case = json.loads(args.case.read_text())
    on = case if args.command == "train" else case["load"]
    do = {"train": begin, "load": load}[args.command]
    dt.prepare()
    dt.reduce_as_on_a_gpu()
    killed = args.command == "train" and case["killed"] > 0
    joined = functools.partial(join, on["nodes"])
    found = explored.on_ranks(lambda rank: do(rank, case, args.folder), args, on["ranks"], joined, killed=killed)
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
