"""What gathering the optimizer's state in place saves: rank 0 of 4 and 400 MB of state, in pairs with upstream's file.

`make bench` prints the figures. Time is that of the slowest rank.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from upstream import run, tree

NEWEST = "0.19.2"
RANKS = 4
STATE = 400e6  # bytes: three fp32 states of four parameters
MIB = 2**20
SIDES = ("ours", "upstream")


def test_save_in_the_torch_format(tmp_path: Path) -> None:
    on = tree("megatron-core", NEWEST)
    elements = int(STATE / 3 / 4 / 4) // 512 * 512  # whole shards, without padding
    options = ("--parts", "cost", "--ranks", str(RANKS), "--elements", str(elements), "--out", tmp_path)
    file = on / "megatron/core/optimizer/distrib_optimizer.py"
    done = run("lean_gather", file, *options, tree=on, delivery="hook")
    ranks = json.loads(done.stdout.splitlines()[-1])["ranks"]
    gathered = ranks[0]["gathered"]
    ratios = {name: statistics.median(used for used, _ in ranks[0][f"{name}, save"]) / gathered for name in SIDES}
    print(
        f"\npeak of rank 0 in the torch save, {RANKS} ranks, {gathered * MIB / 1e6:.0f} MB of state: "
        f"{ratios['ours']:.2f}x the state (figure to reach: 1.15x); upstream {ratios['upstream']:.2f}x"
    )
    for part in ("gather", "save"):
        show_time(part, ranks)


def show_time(part: str, ranks: list[dict[str, Any]]) -> None:
    ours, upstream = (slowest([rank[f"{name}, {part}"] for rank in ranks]) for name in SIDES)
    ratio = statistics.median(a / b for a, b in zip(ours, upstream, strict=True))
    print(
        f"time of the {part}: {ratio:.2f}x upstream's, median of {len(ours)} pairs (figure to reach: 1x); "
        f"{statistics.median(ours):.2f} s, upstream {statistics.median(upstream):.2f} s"
    )


def slowest(ranks: list[list[tuple[float, float]]]) -> list[float]:
    """Of every repetition the longest of all ranks' seconds; a rank has (MiB, seconds) of each."""
    return [max(seconds for _, seconds in repetition) for repetition in zip(*ranks, strict=True)]
