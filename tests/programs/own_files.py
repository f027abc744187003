"""Do with a DeepSpeed release what it does with the checkpoints that it wrote; print what came of it, as JSON.

    own_files.py write FOLDER KIND...
    own_files.py read FOLDER OUTPUT KIND... [--universal KIND...]

`write` trains, saves in FOLDER/KIND, and trains on. `read` loads each checkpoint and trains on; puts its fp32 weights
together; and for the kinds after --universal converts it into OUTPUT and trains on from there. For each of these, by
kind: "" if it went as it should, bit for bit; else what differs, or the error.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from ckpt_patches.demo.deepspeed_training import (
    KINDS,
    STEPS,
    TAG,
    OneTensorParallelRank,
    engine,
    on_ranks,
    save,
    state,
    train,
)
from convert import convert

RANKS = 2
States = dict[str, dict[str, torch.Tensor]]


def write(rank: int, args: argparse.Namespace) -> None:
    """`at_save.pt` and `at_end.pt` are the states of the live optimizer, `losses.json` the losses between them."""
    for kind in args.kinds:
        folder = args.folder / kind
        run = engine(kind, RANKS, universal=False)
        train(run, rank, RANKS, first=0)
        save(run, folder)
        at_save = state(run)
        losses = train(run, rank, RANKS, first=STEPS)
        at_end = state(run)
        if rank == 0:
            torch.save(at_save, folder / "at_save.pt")
            torch.save(at_end, folder / "at_end.pt")
            (folder / "losses.json").write_text(json.dumps(losses))


def resume(rank: int, args: argparse.Namespace) -> None:
    outcomes = {}
    for kind in args.kinds:
        outcomes[kind] = outcome(resumed, rank, args.folder / kind, args.tag(kind), kind)
    if rank == 0:
        args.result.write_text(json.dumps(outcomes))


def resumed(rank: int, folder: Path, tag: str, kind: str) -> str:
    run = engine(kind, RANKS, universal=tag != TAG)
    if tag != TAG:
        run.optimizer.mpu = OneTensorParallelRank
        train(run, rank, RANKS, first=100)  # up to 0.12.2 the step is not loaded: it is that of as many steps
    run.load_checkpoint(str(folder), tag=tag)
    at_load = state(run)
    losses = train(run, rank, RANKS, first=STEPS)
    different = [
        *differences("loaded", at_load, torch.load(folder / "at_save.pt")),
        *differences("at the end", state(run), torch.load(folder / "at_end.pt")),
    ]
    expected = json.loads((folder / "losses.json").read_text())
    return ", ".join(different) or ("" if losses == expected else f"losses {losses}, not {expected}")


def differences(when: str, found: States, expected: States) -> list[str]:
    return [
        f"{when}: {n}.{key}" for n, states in expected.items() for key in states if not found[n][key].equal(states[key])
    ]


def fp32_weights(folder: Path) -> str:
    weights = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=TAG)
    expected = torch.load(folder / "at_save.pt")
    return ", ".join(name for name, states in expected.items() if not weights[name].equal(states["fp32"]))


def outcome(do: Callable[..., str], *args: object) -> str:
    try:
        return do(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def resume_each(args: argparse.Namespace, kinds: Iterable[str], tag: Callable[[str], str]) -> dict[str, str]:
    result = args.output / "resumed.json"
    on_ranks(argparse.Namespace(work=resume, ranks=RANKS, folder=args.folder, kinds=kinds, tag=tag, result=result))
    outcomes: dict[str, str] = json.loads(result.read_text())
    return outcomes


def write_each(args: argparse.Namespace) -> dict[str, str]:
    on_ranks(argparse.Namespace(work=write, ranks=RANKS, folder=args.folder, kinds=args.kinds))
    return {}


def read_each(args: argparse.Namespace) -> dict[str, dict[str, str]]:
    allowed = set(torch.serialization.get_safe_globals())
    converted = {kind: convert(args.folder / kind / TAG, args.output / kind, 1, False) for kind in args.universal}
    fp32 = {kind: outcome(fp32_weights, args.folder / kind) for kind in args.kinds}
    changed = set(torch.serialization.get_safe_globals()) ^ allowed
    # DeepSpeed joins the folder and the tag: an absolute tag is the folder with the converted checkpoint.
    kinds = [kind for kind in args.universal if not converted[kind]]
    return {
        "load": resume_each(args, args.kinds, lambda kind: TAG),
        "convert": converted,
        "load converted": resume_each(args, kinds, lambda kind: str(args.output / kind)),
        "fp32 weights": fp32,
        "allow list": {"changed": ", ".join(map(str, changed))},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    writing, reading = commands.add_parser("write"), commands.add_parser("read")
    writing.set_defaults(do=write_each)
    reading.set_defaults(do=read_each)
    for command in (writing, reading):
        command.add_argument("folder", type=Path)
    reading.add_argument("output", type=Path)
    for command in (writing, reading):
        command.add_argument("kinds", nargs="+", choices=KINDS)
    reading.add_argument("--universal", nargs="*", default=[], choices=KINDS)
    args = parser.parse_args()
    print("\n" + json.dumps(args.do(args)))


if __name__ == "__main__":
    main()
