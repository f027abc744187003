"""Compare dp_zero_lean_gather with upstream's file, in pairs: rank 0's memory with 4 ranks and 400 MB of state.

`make bench` prints the figures. Times are the slowest rank's.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from upstream import newest, run, tree

NEWEST = newest("megatron-core")
RANKS = 4
STATE = 400e6  # bytes: three fp32 states of four parameters
MIB = 2**20
SIDES = ("ours", "upstream")


def test_save_in_the_torch_format(tmp_path: Path) -> None:
    on = tree("megatron-core", NEWEST)
    elements = int(STATE / 3 / 4 / 4) // 512 * 512  # full shards, without padding
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


@pytest.mark.parametrize("ranks", [2, 8, 32, 96])
def test_gather_to_rank_0_on_many_ranks(ranks: int) -> None:
    """The gather takes at most 1.1 times upstream's time and sends no more bytes. Each rank has 20,000 elements."""
    on = tree("megatron-core", NEWEST)
    file = on / "megatron/core/optimizer/distrib_optimizer.py"
    done = run("gather_on_many_ranks", file, str(ranks), "20000", tree=on, delivery="hook")
    found = json.loads(done.stdout.splitlines()[-1])
    times = {name: slowest([rank[name] for rank in found]) for name in SIDES}
    ratio = statistics.median(a / b for a, b in zip(*(times[name] for name in SIDES), strict=True))
    print(f"\n{ranks} ranks: {ratio:.2f}x upstream's time (figure to reach: 1.1x)")
    for name in SIDES:
        messages, sent = (sum(rank[f"{name}, {what}"] for rank in found) for what in ("messages", "bytes"))
        peaks = [statistics.median(used for used, _ in rank[name]) / 1e6 for rank in (found[0], found[-1])]
        milliseconds = 1000 * statistics.median(times[name])
        print(f"  {name:8} {milliseconds:6.1f} ms, {messages} messages, {sent / 1e6:.1f} MB sent")
        print(f"           peak of rank 0 {peaks[0]:.1f} MB, of the last {peaks[1]:.1f} MB")
    assert ratio <= 1.1
    assert sum(rank["ours, bytes"] for rank in found) <= sum(rank["upstream, bytes"] for rank in found)


def show_time(part: str, ranks: list[dict[str, Any]]) -> None:
    ours, upstream = (slowest([rank[f"{name}, {part}"] for rank in ranks]) for name in SIDES)
    ratio = statistics.median(a / b for a, b in zip(ours, upstream, strict=True))
    print(
        f"time of the {part}: {ratio:.2f}x upstream's, median of {len(ours)} pairs (figure to reach: 1x); "
        f"{statistics.median(ours):.2f} s, upstream {statistics.median(upstream):.2f} s"
    )


def slowest(ranks: list[list[tuple[float, float]]]) -> list[float]:
    """The slowest rank's seconds for each repetition. Each rank has pairs of MiB and seconds."""
    return [max(seconds for _, seconds in repetition) for repetition in zip(*ranks, strict=True)]
