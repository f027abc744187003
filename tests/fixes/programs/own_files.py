"""Read with a DeepSpeed release the checkpoints that zero_training.py wrote with it; print the outcomes, as JSON.

    own_files.py FOLDER OUTPUT KIND... [--universal KIND...]

Loads each checkpoint FOLDER/KIND and continues training; merges its fp32 weights; for the kinds after --universal,
converts it into OUTPUT and continues training from there. Prints the outcome of each by kind: "" if it is bit-equal;
else the differences, or the error.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from convert import convert
from trainers.deepspeed_training import (
    KINDS,
    STEPS,
    TAG,
    engine,
    not_equal,
    on_ranks,
    state,
    train,
)

RANKS = 2


def resume(rank: int, args: argparse.Namespace) -> None:
    outcomes = {}
    for kind in args.kinds:
        outcomes[kind] = outcome(resumed, rank, args.folder / kind, args.tag(kind), kind)
    if rank == 0:
        args.result.write_text(json.dumps(outcomes))


def resumed(rank: int, folder: Path, tag: str, kind: str) -> str:
    run = engine(kind, RANKS, universal=tag != TAG)
    run.load_checkpoint(str(folder), tag=tag)
    at_load = state(run)
    losses = train(run, rank, RANKS, first=STEPS)
    different = [f"loaded: {name}" for name in not_equal(torch.load(folder / "truth.pt"), at_load)]
    different += [f"at the end: {name}" for name in not_equal(torch.load(folder / "end.pt"), state(run))]
    expected = json.loads((folder / "losses.json").read_text())
    return ", ".join(different) or ("" if losses == expected else f"losses {losses}, not {expected}")


def fp32_weights(folder: Path) -> str:
    weights = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=TAG)
    expected = torch.load(folder / "truth.pt")
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


def read(args: argparse.Namespace) -> dict[str, dict[str, str]]:
    allowed = set(torch.serialization.get_safe_globals())
    converted = {kind: convert(args.folder / kind / TAG, args.output / kind, 1) for kind in args.universal}
    fp32 = {kind: outcome(fp32_weights, args.folder / kind) for kind in args.kinds}
    changed = set(torch.serialization.get_safe_globals()) ^ allowed
    # DeepSpeed joins the folder and the tag: an absolute tag is the folder of the converted checkpoint.
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
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("kinds", nargs="+", choices=KINDS)
    parser.add_argument("--universal", nargs="*", default=[], choices=KINDS)
    print("\n" + json.dumps(read(parser.parse_args())))


if __name__ == "__main__":
    main()
