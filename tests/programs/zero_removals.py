"""Write ZeRO checkpoints of two steps, and load changed ones with the real DeepSpeed: what upstream makes of each.

    write OUT KIND                OUT/global_step2 and OUT/global_step4, by 2 ranks
    load CASES.json KIND          prints for each folder of the list what the live state of each rank is after the load,
                                  as a digest by name, or {"error": "..."}

All are loaded by the same processes if none of them is an error, else each by processes of its own.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ckpt_patches.demo.deepspeed_training import STEPS, engine, results, snapshot, train
from ckpt_patches.demo.ranks import RankError

RANKS = 2


def write(rank: int, out: str, kind: str) -> None:
    run = engine(kind, RANKS, universal=False)
    for first in (0, STEPS):
        train(run, rank, RANKS, first=first)
        run.save_checkpoint(out, tag=f"global_step{first + STEPS}", client_state={"iteration": first + STEPS})


def load_all(rank: int, folders: list[str], kind: str) -> list[dict[str, str]]:
    return [load(rank, folder, kind) for folder in folders]


def load(rank: int, folder: str, kind: str) -> dict[str, str]:
    torch.manual_seed(rank)
    run = engine(kind, RANKS, universal=False)
    path, _ = run.load_checkpoint(str(Path(folder).parent), tag=Path(folder).name)
    if path is None:
        raise FileNotFoundError(folder)
    live = {**snapshot(run), "module": run.module.state_dict(), "inner": inner_state(run)}
    return {name: digest(value) for name, value in live.items()}


def inner_state(run: Any) -> Any:
    """This rank's own tensors, padding too."""
    return [dict(state) for state in run.optimizer.optimizer.state.values()]


def digest(value: Any) -> str:
    found = hashlib.sha256()
    for part in parts(value):
        found.update(part)
    return found.hexdigest()


def parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, dict):
        for key, item in value.items():
            yield repr(key).encode()
            yield from parts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from parts(item)
    else:
        yield repr(value).encode()


def loaded(folders: list[str], kind: str) -> dict[str, Any]:
    """By folder."""
    try:
        ranks = results(load_all, RANKS, folders, kind)
    except RankError as error:
        if len(folders) == 1:
            return {folders[0]: {"error": str(error)}}
        middle = len(folders) // 2  # the few that fail are found by halves
        return {**loaded(folders[:middle], kind), **loaded(folders[middle:], kind)}
    return {folder: [rank[n] for rank in ranks] for n, folder in enumerate(folders)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=["write", "load"])
    parser.add_argument("path", type=Path)
    parser.add_argument("kind")
    args = parser.parse_args()
    if args.work == "write":
        results(write, RANKS, str(args.path), args.kind)
        print("{}")
    else:
        print(json.dumps(loaded(json.loads(args.path.read_text()), args.kind)))


if __name__ == "__main__":
    main()
