"""Write ZeRO checkpoints of two steps, and load changed ones with the real DeepSpeed: what upstream makes of each.

write OUT KIND                OUT/global_step2 and OUT/global_step4, by 2 ranks
load CASES.json KIND          prints for each folder of the list what the live state of each rank is after the load,
                              as a digest by name, or {"error": "..."}
"""

import json
from pathlib import Path
from typing import Any

import torch

from ckpt_patches.demo import experts_training
from ckpt_patches.demo.deepspeed_training import STEPS, engine, results, snapshot, train
from live_states import by_folder, digest
from program_arguments import parsed

RANKS = 2
EXPERTS = "experts"  # two expert-parallel ranks, at stage 1


def started(kind: str, universal: bool) -> Any:
    if kind == EXPERTS:
        return experts_training.engine(2, 1, universal)
    return engine(kind, RANKS, universal)


def ranks_of(kind: str) -> int:
    return experts_training.RANKS if kind == EXPERTS else RANKS


def write(rank: int, out: str, kind: str) -> None:
    run = started(kind, universal=False)
    for first in (0, STEPS):
        if kind == EXPERTS:
            experts_training.train(run, rank, range(first, first + STEPS))
        else:
            train(run, rank, RANKS, first=first)
        run.save_checkpoint(out, tag=f"global_step{first + STEPS}", client_state={"iteration": first + STEPS})


def load_all(rank: int, folders: list[str], kind: str, universal: bool) -> list[dict[str, str]]:
    return [load(rank, folder, kind, universal) for folder in folders]


def load(rank: int, folder: str, kind: str, universal: bool) -> dict[str, str]:
    torch.manual_seed(rank)
    run = started(kind, universal)
    path, _ = run.load_checkpoint(str(Path(folder).parent), tag=Path(folder).name)
    if path is None:
        raise FileNotFoundError(folder)
    states = experts_training.state(run, 2) if kind == EXPERTS else snapshot(run)
    live = {**states, "module": run.module.state_dict(), "inner": inner_state(run)}
    return {name: digest(value) for name, value in live.items()}


def inner_state(run: Any) -> Any:
    """This rank's own tensors, padding too."""
    return [dict(state) for state in run.optimizer.optimizer.state.values()]


def loaded(folders: list[str], kind: str, universal: bool) -> dict[str, Any]:
    """By folder."""
    return by_folder(lambda own: results(load_all, ranks_of(kind), own, kind, universal), folders)


def main() -> None:
    args = parsed({"work": str, "path": Path, "kind": str}, universal=False)
    if args.work == "write":
        results(write, ranks_of(args.kind), str(args.path), args.kind)
        print("{}")
    else:
        print(json.dumps(loaded(json.loads(args.path.read_text()), args.kind, args.universal)))


if __name__ == "__main__":
    main()
