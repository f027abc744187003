"""Save flattened shards of many shapes with the real zarr strategy; load them with upstream's own loaders.

    zarr_ranges.py OUT CASES.json [--ranks 16]

A case: `shape` of a local shard, `grid` of local shards on each axis, sizes of `prepended` axes, `dtype`, and `cuts`
where the flattened shard is divided between data-parallel ranks. Case N is saved in OUT/N. Prints JSON: the loads with
wrong values, and the remaining lock directories.
"""

import argparse
import itertools
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from program_arguments import parsed
from trainers import zarr_saving


def main() -> None:
    options = parsed({"out": Path, "cases": Path}, ranks=16)
    zarr_saving.spawn(worker, options.ranks, options)


def worker(rank: int, options: argparse.Namespace) -> None:
    from megatron.core.dist_checkpointing.strategies import zarr as strategy

    saver, wrong = strategy.ZarrSaveShardedStrategy("zarr", 1), []
    for number, case in enumerate(json.loads(options.cases.read_text())):
        out = options.out / str(number)
        if rank == 0:
            out.mkdir(parents=True)
        dist.barrier()
        saver.save(own_shard(case, rank), out)
        dist.barrier()
        if rank == 0:
            wrong += [(number, name) for name, loader in loaders() if not loads_right(case, loader, out)]
    if rank == 0:
        locks = [str(path) for path in options.out.glob("*/*.sync")]
        print(json.dumps({"wrong": wrong, "locks": locks}))


def loaders() -> list[tuple[str, Any]]:
    from megatron.core.dist_checkpointing.strategies import tensorstore, zarr

    return [
        ("zarr", zarr.ZarrLoadShardedStrategy()),
        ("tensorstore", tensorstore.TensorStoreLoadShardedStrategy()),
    ]


def own_shard(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """This rank's flattened range; nothing if the case has fewer ranks."""
    places = list(itertools.product(*map(range, [*case["prepended"], *case["grid"]])))
    ranges = list(itertools.pairwise([0, *case["cuts"], math.prod(case["shape"])]))
    if rank >= len(places) * len(ranges):
        return {}
    place, (start, stop) = places[rank // len(ranges)], ranges[rank % len(ranges)]
    return {"w": tensor(case, place, values(case, place).flatten()[start:stop], slice(start, stop))}


def values(case: dict[str, Any], place: tuple[int, ...]) -> torch.Tensor:
    """The values of the local shard at that place of the grid."""
    generator = torch.Generator().manual_seed(1 + hash(place) % 1000)
    return (torch.randn(case["shape"], generator=generator) * 50).to(getattr(torch, case["dtype"]))


def tensor(case: dict[str, Any], place: tuple[int, ...], data: Any, flattened_range: slice | None) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    prepended = len(case["prepended"])
    local = [1] * prepended + case["shape"]
    fragmentations = [*case["prepended"], *case["grid"]]
    return ShardedTensor(
        "optimizer.state.exp_avg.w",
        data,
        getattr(torch, case["dtype"]),
        tuple(case["shape"]),
        tuple(n * f for n, f in zip(local, fragmentations, strict=True)),
        tuple(n * p for n, p in zip(local, place, strict=True)),
        tuple(fragmentations),
        replica_id=0,
        prepend_axis_num=prepended,
        flattened_range=flattened_range,
    )


def loads_right(case: dict[str, Any], loader: Any, out: Path) -> bool:
    """Whether upstream loads every local shard correctly, both complete and its middle."""
    for place in itertools.product(*map(range, [*case["prepended"], *case["grid"]])):
        expected, numel = values(case, place), math.prod(case["shape"])
        middle = slice(numel // 3, numel // 3 + (numel + 1) // 2)
        state = {
            "whole": tensor(case, place, torch.empty_like(expected), None),
            "middle": tensor(case, place, torch.empty_like(expected.flatten()[middle]), middle),
        }
        loaded = loader.load(state, out)
        if not torch.equal(loaded["whole"].reshape(expected.shape), expected):
            return False
        if not torch.equal(loaded["middle"], expected.flatten()[middle]):
            return False
    return True


if __name__ == "__main__":
    main()
