"""Count the operations of 2 to 8 ranks with and without the fixes (`make bench`)."""

from pathlib import Path

import growth
from growth import Counts, Size

RANKS = (2, 4, 8)
SIDES = ("upstream", "ours")
RUNS = {"megatron": growth.MEGATRON, "zero": growth.ZERO, "zarr": growth.ZARR}
# The run, its part, the measure, and the panel's title.
PANELS = (
    ("megatron", "torch, save", "messages", "messages, save in the format torch"),
    ("megatron", "torch, save", "bytes", "bytes sent, save in the format torch"),
    ("megatron", "fully_reshardable, save", "messages", "messages, save in fully_reshardable"),
    ("zero", "stage 1, save", "messages", "messages, save of ZeRO stage 1"),
    ("zero", "stage 3, conversion", "opened", "files opened, universal conversion of stage 3"),
    ("zarr", "save", "metadata", "other metadata operations, save by zarr"),
)
Sweeps = dict[tuple[str, str, int], Counts]  # by run, side and number of ranks


def test_what_grows_with_the_number_of_ranks(tmp_path: Path) -> None:
    found: Sweeps = {
        (name, side, ranks): growth.counted(run, Size(ranks), side, tmp_path / f"{name}{ranks}")
        for name, run in RUNS.items()
        for side in growth.DELIVERIES
        for ranks in RANKS
    }
    for name, part, measure, title in PANELS:
        print(f"\n{title}: {', '.join(f'{side} {values(found, name, side, part, measure)}' for side in SIDES)}")


def values(found: Sweeps, name: str, side: str, part: str, measure: str) -> list[int]:
    """The sum over all ranks, for each number of ranks."""
    return [sum(rank[measure] for rank in found[name, side, ranks][part]) for ranks in RANKS]
