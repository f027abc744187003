"""Train and save one configuration of the explorer with the real megatron-core on CPU ranks, or load and judge it.

    explore_megatron.py train CASE.json FOLDER     writes two saves, FOLDER/first and FOLDER/last, and FOLDER/truth.pt
    explore_megatron.py load CASE.json FOLDER      prints the result of the load as JSON

The truth is the content of the optimizers' memory. This program reads it without any sharded state dict.
"""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

from trainers import megatron_training as mt  # isort: skip  the GPU stub must load first
import torch
import torch.distributed as dist

import explored
from explored import FIRST, LAST, SaveFailed
from trainers import judge, megatron_lm
from trainers.gpt_training import Options, initialize
from trainers.judge import State, is_nothing
from trainers.megatron_run import LAYOUT, finished_after, load_into, save, started, train
from trainers.megatron_state import Run, complete, kind_of, leaves, live, parts, put

MORE = 2  # the number of steps after the load
ENDS = ("saved", "end")


def begin(rank: int, case: Options, folder: Path) -> Options:
    options = case["run"]
    run = started(options, options, seed=1)
    at, truth, ends = options["steps"], {}, []
    train(run, 0, at)
    for tag, more in ((FIRST, 1 if case["two_saves"] else MORE), (LAST, MORE)):
        saved = complete(run, options)
        try:
            with mock.patch("torch.save", explored.saver(case, tag, rank)):
                non_persistent = options["non_persistent"] and tag == LAST
                asked = save(run, options, at, folder / tag, non_persistent=non_persistent)
            if asked is not None:
                ends.append(finished_after(asked, folder / f"{tag}.go", options["persistent"]))
        except Exception as error:
            raise SaveFailed(f"{type(error).__name__}: {error}") from error
        truth[tag] = {"saved": saved, "losses": train(run, at, more), "at": at, "end": complete(run, options)}
        for end in ends:
            end()
        ends.clear()
        at += more
        if not case["two_saves"]:
            break
    if rank == 0:
        torch.save(truth, folder / "truth.pt")
    return {"optimizer": type(leaves(run.optimizer)[0]).__name__}


def load(rank: int, case: Options, folder: Path) -> Options:
    """Load, and return the differences from the truth on any rank and in the losses and states of the next steps."""
    wanted, options = case["load"], dict(case["run"])
    if wanted["format"] != "same":
        options["format"] = wanted["format"]
    truths = torch.load(folder / "truth.pt", weights_only=False)
    truth = truths[wanted["tag"]]
    now: Callable[[Run], State] = partial(complete, options=options) if goes_on(case) else live
    if not goes_on(case):  # another layout has other RNG states
        truth |= {end: {key: value for key, value in truth[end].items() if kind_of(key) != "rng"} for end in ENDS}
    changed: Options = {"override": True} if wanted["override"] else {}
    changed |= {"offload": wanted["offload"]} if wanted["offload"] != "same" else {}
    run = started(options, wanted, seed=2, **changed)
    if wanted["trained"]:
        train(run, 50, 1)
    for number in range(wanted["times"]):
        if number:  # a rollback
            train(run, 60, 1)
        before = now(run)
        with explored.proof() as proof:
            load_into(run, options, folder / wanted["tag"], wanted["restore"], ckpt_step=wanted["ckpt_step"])
    if wanted.get("spoil"):
        explored.spoil(parts(run), wanted["spoil"])
    found, expected = now(run), promised(truth, before, started(options, wanted, seed=3, **changed), wanted)
    of_another = bool(wanted["saved_by"])
    different = judge.on_any_rank(_different(found, expected, of_another))
    if wanted["repaired"]:
        train(run, 70, 1)
        return {"different": explored.unrepaired(different, found, truths, case), "proof": proof}
    if different:
        return {"different": different, "proof": proof}
    losses, end = truth["losses"], truth["end"]
    if not goes_on(case):
        reference = started(options, wanted, seed=3, **changed)
        if any(kind_of(name) == "state" for name in expected):
            train(reference, 90, 2)  # a fresh optimizer has no states yet
        put(reference, expected)
        losses = train(reference, truth["at"], len(losses))
        end = live(reference)
    differ = ["next loss"] * (train(run, truth["at"], len(losses)) != losses)
    later = judge.on_any_rank(_different(now(run), end, of_another))
    return {"different": differ + [f"later {name}" for name in later], "proof": proof}


def goes_on(case: Options) -> bool:
    """Return whether the next steps equal those of the saved run. Another layout changes the order of sums."""
    wanted, run = case["load"], {**case["run"], "ranks": case["ranks"]}
    same = all(wanted[name] == run[name] for name in (*LAYOUT, "ranks"))
    as_it_was = not wanted["override"] and wanted["offload"] == "same" and not wanted["saved_by"]
    return same and as_it_was and wanted["restore"] == "everything"


def promised(truth: State, before: State, fresh: Run, wanted: Options) -> State:
    """Return the expected state after a load."""
    saved: State = truth["saved"]
    if wanted["restore"] == "weights":  # main parameters equal the loaded weights
        mains = {key: value for key, value in before.items() if kind_of(key) in ("fp32", "copy")}
        expected = {
            key: torch.where(value.isnan(), value, saved[f"{key.rpartition('.')[0]}.weight"].to(value.dtype))
            for key, value in mains.items()  # a copy exists only for parameters on a rank's CPU
        }
        expected |= {key: value for key, value in saved.items() if kind_of(key) == "weight"}
        return before | expected
    expected = {key: value for key, value in saved.items() if kind_of(key) != "copy"}
    copies = {key: value for key, value in before.items() if kind_of(key) == "copy"}  # may cover another part
    expected |= {
        key: torch.where(own.isnan(), own, saved[key.removesuffix("copy") + "fp32"]) for key, own in copies.items()
    }
    if wanted["restore"] == "without scheduler":
        expected |= {key: value for key, value in before.items() if kind_of(key) == "scheduler"}
    if wanted["override"]:
        fresh.scheduler.step(int(saved["scheduler.num_steps"]))
        own = {key: value for key, value in live(fresh).items() if kind_of(key) in ("setting", "scheduler")}
        expected |= {key: value for key, value in own.items() if not key.endswith(".is_decoupled_lr")}
    return expected


def _different(found: State, expected: State, of_another: bool) -> list[str]:
    """Return the entries that differ. A missing state equals zeros. Other releases may lack some settings."""
    missing = [key for key in {*found, *expected} if found.get(key) is None or expected.get(key) is None]
    nothing = {key for key in missing if is_nothing(found.get(key), expected.get(key))}
    nothing |= {key for key in missing if of_another and kind_of(key) == "setting"}
    return [key for key in judge.different(found, expected) if key not in nothing]


def join(layout: Options, rank: int, ranks: int, port: int) -> None:
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": rank, "RANK": rank, "WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in own.items()})
    mt.fork_keeper_of_results()
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    initialize(layout)


def main() -> None:
    args = explored.arguments("train", "load").parse_args()
    case = json.loads(args.case.read_text())
    layout = {**case["run"], **(case["load"] if args.command == "load" else {"ranks": case["ranks"]})}
    args.folder.mkdir(exist_ok=True)
    mt.import_packages()
    if case["run"]["trainer"]:
        megatron_lm.import_training()
    do = {"train": begin, "load": load}[args.command]
    found = explored.on_ranks(lambda rank: do(rank, case, args.folder), args, layout["ranks"], partial(join, layout))
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
