"""Write ZeRO checkpoints of two steps, and load changed ones with the real DeepSpeed: upstream's result for each.

write OUT KIND                OUT/global_step2 and OUT/global_step4
load CASES.json KIND          prints the live state of each rank after the load of each folder in the list, as a digest
                              by name, or {"error": "..."}
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import test_autotp_fused_widths as autotp_fused_widths
import tied_stages
from live_states import by_folder, digest
from program_arguments import parsed
from trainers import deepspeed_options, experts_training
from trainers.deepspeed_training import STEPS, engine_of, flat_groups, results, snapshot, train
from trainers.options import DEEPSPEED

AT_ONCE = 25  # loads per process: Gloo keeps the threads of every group


# Other optimizers and rare model features, through `deepspeed_options`.
OPTIONS: dict[str, dict[str, Any]] = {
    "stage2, frozen, tied, masked": {"stage": 2, "frozen": True, "tied": True, "buffers": True},
    "stage2, LoRA": {"stage": 2, "groups": 1, "lora": True},
    "stage1, SGD with momentum": {"stage": 1, "optimizer": "momentum"},
    "stage1, NAdam": {"stage": 1, "optimizer": "NAdam"},
    "stage2, RMSprop": {"stage": 2, "optimizer": "RMSprop"},
}


class Kind(NamedTuple):
    """A training of one kind."""

    ranks: int
    engine: Callable[[bool], Any]  # takes whether it loads a universal checkpoint
    train: Callable[[Any, int, int], object]  # takes the engine, the rank and the first step
    states: Callable[[Any], dict[str, Any]]


def kind_of(name: str) -> Kind:
    """The kind with this name; unlisted ones are those of `trainers`, on two ranks."""
    found = {
        "experts": Kind(  # two expert-parallel ranks, at stage 1
            experts_training.RANKS,
            lambda universal: experts_training.engine(2, 1, universal),
            lambda run, rank, first: experts_training.train(run, rank, range(first, first + STEPS)),
            lambda run: experts_training.state(run, 2),
        ),
        "pipeline": Kind(  # two stages of two data-parallel ranks, with a tied embedding
            4,
            lambda universal: tied_stages.engine(0, universal=universal),
            lambda run, _, first: tied_stages.train(run, first),
            tied_stages.live,
        ),
        "pipeline, tensor parallel": Kind(  # two stages of two ranks with one slice each
            4,
            lambda universal: tied_stages.engine(0, universal=universal, tensor_parallel=2),
            lambda run, _, first: tied_stages.train(run, first),
            tied_stages.live,
        ),
        "autotp": Kind(  # two tensor-parallel by two data-parallel ranks
            4,
            lambda universal: autotp_fused_widths.engine(1, universal, 0),
            lambda run, _, first: autotp_fused_widths.train(run, first),
            lambda run: {"masters": [master for master, _ in flat_groups(run)]},
        ),
        "autotp, stage 3": Kind(
            4,
            lambda universal: autotp_fused_widths.engine(3, universal, 0),
            lambda run, _, first: autotp_fused_widths.train(run, first),
            lambda run: {"masters": list(run.optimizer.fp32_partitioned_groups_flat)},
        ),
    }
    if name in OPTIONS:
        options = {**DEEPSPEED, "groups": 2, **OPTIONS[name]}
        return Kind(
            2,
            lambda _: deepspeed_options.engine(options, {"ranks": 2, "nodes": 1}, torch.initial_seed()),
            lambda run, _, first: deepspeed_options.train(run, options, first, STEPS),
            lambda run: {"masters": [master for master, _ in flat_groups(run)]},
        )
    zero = Kind(
        2,
        lambda universal: engine_of(name, 2, universal),
        lambda run, rank, first: train(run, rank, 2, first=first),
        snapshot,
    )
    return found.get(name, zero)


def write(rank: int, out: str, kind: str) -> None:
    made = kind_of(kind)
    torch.manual_seed(0)
    run = made.engine(False)
    for first in (0, STEPS):
        made.train(run, rank, first)
        run.save_checkpoint(out, tag=f"global_step{first + STEPS}", client_state={"iteration": first + STEPS})


def load_all(rank: int, folders: list[str], kind: str, universal: bool) -> list[dict[str, str]]:
    return [load(rank, folder, kind, universal) for folder in folders]


def load(rank: int, folder: str, kind: str, universal: bool) -> dict[str, str]:
    torch.manual_seed(rank)
    made = kind_of(kind)
    run = made.engine(universal)
    path, _ = run.load_checkpoint(str(Path(folder).parent), tag=Path(folder).name)
    if path is None:
        raise FileNotFoundError(folder)
    live = {**made.states(run), "module": run.module.state_dict(), "inner": inner_state(run)}
    return {name: digest(value) for name, value in live.items()}


def inner_state(run: Any) -> Any:
    """This rank's own tensors, including padding."""
    return [dict(state) for state in run.optimizer.optimizer.state.values()]


def loaded(folders: list[str], kind: str, universal: bool) -> dict[str, Any]:
    """The loaded states by folder."""
    found: dict[str, Any] = {}
    for first in range(0, len(folders), AT_ONCE):
        some = folders[first : first + AT_ONCE]
        found |= by_folder(lambda own: results(load_all, kind_of(kind).ranks, own, kind, universal), some)
    return found


def main() -> None:
    args = parsed({"work": str, "path": Path, "kind": str}, universal=False)
    if args.work == "write":
        results(write, kind_of(args.kind).ranks, str(args.path), args.kind)
        print("{}")
    else:
        print(json.dumps(loaded(json.loads(args.path.read_text()), args.kind, args.universal)))


if __name__ == "__main__":
    main()
